"""Defines the request and the result of a pop, and tracks whether the client is still connected.

This module contains only values; ``subscription`` serves the pops.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from popgate.domain.message import Message
from popgate.domain.names import ClientId
from popgate.engine.lease.selection import ANY, Selection
from popgate.engine.queue.buffered import BufferedMessage, size_of
from popgate.runtime.deadlines import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class PopRequest:
    """The parameters of a pop, of a pull or of a purge.

    If ``invisibility_seconds`` is None, the subscription's policy applies. A repeated request with the same
    ``attempt_id`` gets the same leases. ``client`` is the name that the client has sent; it is written to the journal.
    ``selection`` selects the messages that the pop may get. ``answer_bytes`` returns an upper bound for the size of the
    given message in the answer. The size of all messages in the answer is limited to ``ANSWER_BYTES_MAX``.
    """

    max_messages: int = 1
    wait_seconds: float = 0.0
    invisibility_seconds: float | None = None
    attempt_id: str | None = None
    client: ClientId | None = None
    selection: Selection = ANY
    answer_bytes: Callable[[Message], int] = size_of


class Leased(NamedTuple):
    """One message leased by a pop. Times are Unix seconds."""

    message: Message
    message_id: str
    receipt_handle: str
    queue: int
    delivery_count: int
    first_delivered_at: float
    invisible_until: float


class Presence:
    """Tracks whether the client of a request is connected.

    The HTTP interface calls ``leave`` when the client disconnects.
    """

    __slots__ = ("gone", "on_leave")

    def __init__(self) -> None:
        self.gone = False
        self.on_leave: Callable[[], None] | None = None

    def leave(self) -> None:
        """Record that the client has disconnected, or may not wait any longer. Idempotent."""
        if self.gone:
            return
        self.gone = True
        if self.on_leave is not None:
            self.on_leave()


class Waiter:
    """A parked pop. The result of ``future`` is the messages for the pop, or an empty list when the wait time is over.

    ``short``: the pop waits only for messages that were at the broker when ``Serving.changes`` had the value
    ``changes``. ``position``: the parked pop with the smallest position is served first. ``when_due`` is called when
    the wait time is over.
    """

    __slots__ = ("changes", "future", "position", "request", "short", "timer", "when_due")

    def __init__(self, request: PopRequest, *, short: bool, changes: int) -> None:
        self.request = request
        self.short = short
        self.changes = changes
        self.position = 0
        self.when_due: Callable[[Waiter], None] = Waiter.give_up
        self.timer = NEVER
        self.future: asyncio.Future[list[BufferedMessage]] = asyncio.get_running_loop().create_future()

    def give_up(self) -> None:
        if not self.future.done():
            self.future.set_result([])

    def due(self, now: float) -> float | None:
        self.when_due(self)
        return None
