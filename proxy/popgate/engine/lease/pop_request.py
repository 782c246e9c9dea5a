"""The request and the result of a pop, and whether its client is still connected.

Holds values only; ``subscription`` does the work.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from popgate.domain.filters import HeaderFilter
from popgate.domain.message import Message
from popgate.domain.names import ClientId, LeaseId
from popgate.engine.lease.pull_lease import PullLease
from popgate.engine.queue.buffered import BufferedMessage, MessageState, size_of
from popgate.ports.leases import GroupPart
from popgate.runtime.deadlines import NEVER

LINES_MAX = 1_000
"""Maximum number of ordering keys that a lease group remembers although no message stands behind their members."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024


class GroupLease(NamedTuple):
    """The lease group for which a pop leases, and the lease id that all its members share.

    ``tails``: the last member of each ordering key that an earlier pop for the group has taken. The message behind it
    may become a member, too.
    """

    part: GroupPart
    lease_id: LeaseId
    tails: dict[tuple[int, str], BufferedMessage]

    def note(self, taken: Iterable[BufferedMessage]) -> None:
        """Note that ``taken`` are leased for the group, in order."""
        for held in taken:
            if held.key is not None:
                self.tails[held.queue_index, held.key] = held

    def followers(self) -> Iterator[BufferedMessage]:
        """Return the messages right behind members. If many keys have no message left, they are forgotten."""
        ended: list[tuple[int, str]] = []
        for line, tail in self.tails.items():
            behind = tail.next_of_key()
            if behind is None:
                ended.append(line)
            elif tail.state is MessageState.LEASED and tail.lease_id == self.lease_id:
                yield behind
        if len(ended) > LINES_MAX:
            for line in ended:
                del self.tails[line]


@dataclass(frozen=True, slots=True, kw_only=True)
class PopRequest:
    """The parameters of a pop, or of a pull.

    ``invisibility_seconds`` None: the subscription's policy. ``attempt_id``: a repeat gets the same leases.
    ``group``: its messages become members of that lease group. ``pull``: it is a pull from that queue alone.
    ``by_admin``: neither a pause nor ``max_in_flight`` stops it.
    ``matches``: the filter on a message's headers; None: any message.
    ``client_id``: the client's own name for itself, for the journal.
    ``answer_bytes``: the maximum size of a message in the answer; the answer ends at ``ANSWER_BYTES_MAX``.
    """

    max_messages: int = 1
    wait_seconds: float = 0.0
    invisibility_seconds: float | None = None
    attempt_id: str | None = None
    client_id: ClientId | None = None
    group: GroupLease | None = None
    pull: PullLease | None = None
    by_admin: bool = False
    matches: HeaderFilter | None = None
    answer_bytes: Callable[[Message], int] = size_of

    @property
    def is_choosy(self) -> bool:
        """Whether it may get a message when other pops get none, or the other way round."""
        return self.by_admin or self.lease_id is not None or self.matches is not None

    @property
    def client(self) -> str | None:
        """Return the name of the client that gets the messages, as far as it is known."""
        if self.pull is not None:
            return self.pull.client_id
        return self.client_id if self.group is None else self.group.part.key.stream

    @property
    def lease_id(self) -> LeaseId | None:
        """Return the lease id that its messages share with those of other pops; None: the pop gets its own."""
        lease = self.group or self.pull
        return None if lease is None else lease.lease_id


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
    """Knows whether the client of a request is still connected. The HTTP interface calls ``leave`` when it is not."""

    __slots__ = ("gone", "on_leave")

    def __init__(self) -> None:
        self.gone = False
        self.on_leave: Callable[[], None] | None = None

    def leave(self) -> None:
        self.gone = True
        if self.on_leave is not None:
            self.on_leave()


class Waiter:
    """A parked pop. Its future gets the candidates, or an empty list when its wait time is over.

    ``short``: it waits only for messages that the broker was known to have when ``Serving.changes`` was ``changes``.
    ``position``: its place among the parked pops; the smallest is the first. ``when_due``: called when its wait time is
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
