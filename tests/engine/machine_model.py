"""What a client may expect of messages: the plain model against which the engine's state machine is checked.

It knows messages, leases, lease groups and times, and nothing of how popgate works.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from popgate.domain.topics import Policy
from popgate.engine.lease_groups.slices import GroupMessage


class State(Enum):
    READY = 1
    LEASED = 2
    WAITING = 3
    EXHAUSTED = 4
    """Visible, but with all its deliveries used: no client gets it, and it becomes a dead letter."""
    ACKED = 5
    DEAD = 6
    GONE = 7
    """Its time to live is over: no client gets it any more. A lease that was valid before may still settle it."""


ENDING = (State.EXHAUSTED, State.GONE)
"""States in which no client gets it; until it has left, its latest lease may settle it."""


@dataclass
class Expected:
    """The expected state of one message in one group. ``handle`` is the latest lease's, ``good`` while it may
    settle.
    """

    body: str
    key: str | None = None
    color: str = "red"
    state: State = State.READY
    count: int = 0
    handle: str = ""
    good: bool = False
    ends: float = 0.0
    released: bool = False
    was_delayed: bool = False
    expires: float = inf
    gone: bool = False
    """Whether it is certainly gone, so that it blocks no other message."""
    came_back: bool = False
    """Whether it was settled before a crash: it may block others until a pop tries to take it and notices."""

    def lease(self, handle: str, count: int, *, ends: float) -> None:
        """Record that a client got it for the ``count``-th time."""
        self.state, self.handle, self.count, self.ends = State.LEASED, handle, count, ends
        self.good, self.released = True, False


@dataclass
class Id:
    """The known state of a dedup_id: its message, since when, and whether it was tried, is stored, and is confirmed."""

    body: str
    since: float
    tried: bool = False
    stored: bool = False
    confirmed: bool = False


@dataclass
class Batch:
    """The expected state of one lease group. ``handle`` stands for its lease, whose receipts no client has.

    ``slices``: what was read at first; messages in them that are no longer ``members`` are lost.
    """

    handle: str
    ends: float = 0.0
    members: list[Expected] = field(default_factory=list[Expected])
    slices: list[list[GroupMessage]] = field(default_factory=list[list[GroupMessage]])
    lost: int = 0

    @property
    def is_frozen(self) -> bool:
        return bool(self.slices)

    def holds(self, one: Expected) -> bool:
        """Tell whether no other client has taken it since: then it is there, whatever the state of the lease."""
        return one.handle == self.handle and one.good

    def surely(self) -> list[Expected]:
        return [one for one in self.members if self.holds(one) and one.state not in ENDING]

    def perhaps(self) -> list[Expected]:
        """Record that it may have left already, or not."""
        return [one for one in self.members if self.holds(one) and one.state in ENDING]

    def read(self, number: int) -> list[GroupMessage]:
        there = {one.body for one in self.members}
        return [one for one in self.slices[number] if one.message.body.decode() in there]


@dataclass
class Stream:
    """The lease groups of one stream by epoch, and what was acked through the latest requested epoch."""

    batches: dict[int, Batch] = field(default_factory=dict[int, Batch])
    acked_through: int = -1
    acked: int = 0
    lost: int = 0


@dataclass
class Group:
    policy: Policy
    messages: dict[str, Expected] = field(default_factory=dict[str, Expected])
    by_handle: dict[str, Expected] = field(default_factory=dict[str, Expected])
    attempts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    streams: defaultdict[str, Stream] = field(default_factory=lambda: defaultdict(Stream))

    def having(self, *states: State) -> list[Expected]:
        return [one for one in self.messages.values() if one.state in states]

    def before(self, one: Expected) -> list[Expected]:
        """Return the earlier ones of its ordering key."""
        earlier: list[Expected] = []
        for other in self.messages.values():
            if other is one:
                break
            if one.key is not None and other.key == one.key:
                earlier.append(other)
        return earlier

    def on_offer(self, color: str | None) -> list[Expected]:
        """Return what the next pop with this filter may get, allowing for all requests in progress."""
        return [
            one
            for one in self.having(State.READY)
            if color in (None, one.color)
            and all(other.gone and (not other.came_back or color in (None, other.color)) for other in self.before(one))
            # A delayed one may come up to a second late.
            and (one.count or not one.was_delayed)
        ]

    def check_turn(self, one: Expected, started: float, together: Sequence[Expected]) -> None:
        """Check that it was visible and next in line; it was handed out since ``started``, right after ``together``."""
        just_expired = one.state is State.GONE and one.expires > started
        assert one.state is State.READY or just_expired, f"{one} was handed out"
        for other in self.before(one):
            over = other.state in (State.ACKED, State.DEAD, State.EXHAUSTED, State.GONE)
            assert over or other in together, f"{one} was handed out before {other}"

    def visible(self, one: Expected, now: float) -> None:
        most = self.policy.max_deliveries
        one.state = State.GONE if now >= one.expires else State.READY
        if most is not None and one.count >= most:
            one.state = State.EXHAUSTED

    def wait(self, one: Expected, now: float, seconds: float) -> None:
        """Make it visible again after ``seconds``."""
        if seconds > 0:
            one.state, one.ends = State.WAITING, now + seconds
        else:
            self.visible(one, now)
