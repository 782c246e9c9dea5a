"""One message that the proxy knows of: waiting, leased, or on its way.

Kept small: there may be 100,000 of them. States change synchronously, between awaits.

        deliveries             grant
    ---> READY ---> GRANTING ---------> LEASED ---> (settled: dropped)
         ^ | ^          |                 |  \\
         | | +----------+ store failed    |   +---> MOVING ---> (dead-lettered: dropped)
         | +-> RETURNING                  |
         |    (given back to the broker)  |
         +-------------- WAITING <--------+ expired or released with a delay
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from popgate.domain.message import Message
from popgate.domain.names import CopyId, LeaseId
from popgate.runtime.deadlines import NEVER

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost

NO_LEASE = LeaseId("")
FIRST = 8
"""More than there are states: see ``Tally``."""
OVERHEAD_BYTES = 1_024
"""What a held message costs beside its body."""


def size_of(message: Message) -> int:
    """What a message costs beside its fixed overhead: its body, and its headers as far as they are text."""
    size = len(message.body)
    for name, value in message.headers.items():
        size += len(name) + (len(value) if isinstance(value, str | bytes) else 0)
    return size


def cost_of(message: Message) -> int:
    """The memory that a message is held in, about."""
    return OVERHEAD_BYTES + size_of(message)


class HeldState(IntEnum):
    READY = 0
    GRANTING = 1
    LEASED = 2
    WAITING = 3
    MOVING = 4
    RETURNING = 5
    """Given back to the broker, one by one: it keeps its place until it is delivered again."""
    DISCARDING = 6
    """Its time to live is over: on its way out (``discarding``)."""
    DROPPED = 7


class Tally:
    """How many messages of a queue are in which state, kept as they change: to count them takes a walk."""

    def __init__(self) -> None:
        self.counts = [0] * 2 * FIRST
        """By state; and from FIRST on those of them that are first of their line."""

    def all(self, state: HeldState) -> int:
        return self.counts[state] + self.counts[FIRST + state]

    def first(self, state: HeldState) -> int:
        return self.counts[FIRST + state]

    @property
    def under_way(self) -> int:
        """Those that the store was asked about."""
        return self.all(HeldState.GRANTING) + self.all(HeldState.DISCARDING)

    @property
    def out(self) -> int:
        """With clients, or on the way to them."""
        return self.all(HeldState.LEASED) + self.all(HeldState.GRANTING)


class Held:
    """A message of one queue. Times are monotonic but for those that end in ``_at`` (Unix seconds of the store).

    ``tag`` None: the broker has it, we only know its record. ``message`` None: not delivered yet, or its body was
    dropped to save memory; a requeue brings it back. ``deadline`` is when the lease or the delay ends; ``timer``, when
    the deadline loop looks at it next, may be earlier. ``rank`` 0: not delivered on this channel yet; else it keeps its
    place among the ready. ``key``, ``behind`` and ``is_first`` are its line's (``lines``): without an ordering key it
    is always the first. ``is_offered``: it stands in the heap of the ready already, maybe with an earlier rank.
    ``is_kept``: its body is not forgotten while it is leased (``Supply.keep``).
    ``client`` and ``invisibility_seconds``, of its present or last lease, are for the journal, and known only where the
    lease was given (``ports.journal.Subject``).
    """

    __slots__ = (
        "_is_first",
        "_state",
        "behind",
        "client",
        "copy_id",
        "deadline",
        "delivery_count",
        "earlier_deliveries",
        "epoch",
        "first_delivered_at",
        "host",
        "invisibility_seconds",
        "is_kept",
        "is_offered",
        "key",
        "lease_id",
        "leased_at",
        "message",
        "queue_index",
        "rank",
        "tag",
        "timer",
    )

    def __init__(self, host: QueueHost, copy_id: CopyId) -> None:
        self.host = host
        self.queue_index = host.queue.number  # the journal asks for it with every event
        self.copy_id = copy_id
        self.message: Message | None = None
        self.tag: int | None = None
        self._state = HeldState.READY
        self.rank = 0
        self.key: str | None = None
        self.behind: Held | None = None
        self._is_first = True
        self.is_offered = False
        self.is_kept = False
        self.lease_id = NO_LEASE
        self.epoch = 0
        self.deadline = NEVER
        self.timer = NEVER
        self.delivery_count = 0
        self.earlier_deliveries = 0
        self.first_delivered_at = 0.0
        self.leased_at = 0.0
        self.client: str | None = None
        self.invisibility_seconds = 0.0
        host.tally.counts[FIRST + HeldState.READY] += 1

    @property
    def state(self) -> HeldState:
        return self._state

    @state.setter
    def state(self, state: HeldState) -> None:
        counts, offset = self.host.tally.counts, FIRST if self._is_first else 0
        counts[offset + self._state] -= 1
        counts[offset + state] += 1
        self._state = state

    @property
    def is_first(self) -> bool:
        return self._is_first

    @is_first.setter
    def is_first(self, is_first: bool) -> None:
        if is_first is not self._is_first:
            counts, state = self.host.tally.counts, self._state
            counts[state + FIRST * self._is_first] -= 1
            counts[state + FIRST * is_first] += 1
            self._is_first = is_first

    @property
    def is_under_way(self) -> bool:
        """Whether the store was asked about it: what it answers there will say what it is."""
        return self._state is HeldState.GRANTING or self._state is HeldState.DISCARDING

    @property
    def has_changed_hands(self) -> bool:
        """Whether it is not known here any more because its queue was given up, though its lease may last: its owner
        knows, be it this proxy once more."""
        return self._state is HeldState.DROPPED and (not self.host.is_owned or self.copy_id in self.host.held)

    @property
    def is_unsorted(self) -> bool:
        """Whether it waits for its place in a line."""
        return self.key is None and not self.is_first

    def next_in_line(self) -> Held | None:
        """Who stands behind it."""
        behind = self.behind
        while behind is not None and behind.state is HeldState.DROPPED:
            behind = behind.behind
        if behind is not None:  # else the last of the line, though dropped, is where the next one joins
            self.behind = behind
        return behind

    def __lt__(self, other: Held) -> bool:
        """Two of one rank are the same message before and after it was given back: either may come first."""
        return False

    def due(self, now: float) -> float | None:
        """Called by the deadline loop. A deadline that was moved away meanwhile is asked for again."""
        if self.state is not HeldState.LEASED and self.state is not HeldState.WAITING:
            return None
        if self.deadline > now:
            return self.deadline
        self.host.deadline_passed(self)
        return None
