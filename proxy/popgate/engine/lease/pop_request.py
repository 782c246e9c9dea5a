"""Defines the request and the result of a pop, and tracks whether its client is still connected.

Holds values only; ``subscription`` does the work.
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

    ``invisibility_seconds`` None: the subscription's policy applies. ``attempt_id``: a repeated request with this id
    gets the same leases. ``selection``: the messages that the pop may get. ``client``: the name that the client gives
    itself, for the journal. ``answer_bytes`` returns the maximum size of a message in the answer. The total is limited
    to ``ANSWER_BYTES_MAX``.
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
    """Tracks whether the client of a request is connected. The HTTP interface calls ``leave`` when it disconnects."""

    __slots__ = ("gone", "on_leave")

    def __init__(self) -> None:
        self.gone = False
        self.on_leave: Callable[[], None] | None = None

    def leave(self) -> None:
        self.gone = True
        if self.on_leave is not None:
            self.on_leave()


class Waiter:
    """A parked pop. The result of its future is the candidates, or an empty list when the wait time is over.

    ``short``: the pop waits only for messages that the broker held when ``Serving.changes`` was ``changes``.
    ``position``: the place among the parked pops; the smallest is first. ``when_due`` is called when the wait time is
    over.
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
