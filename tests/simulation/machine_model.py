"""What a client may expect of messages: the plain model that the engine's state machine is held against.

Knows messages, leases and times, and nothing of how popgate works.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from popgate.domain.topics import Policy


class State(Enum):
    READY = 1
    LEASED = 2
    WAITING = 3
    EXHAUSTED = 4
    """Visible, and handed out as often as it may be: nobody gets it, and it ends in the dead letters."""
    ACKED = 5
    DEAD = 6
    GONE = 7
    """Its time to live is over: nobody gets it any more. A lease that was good before may still settle it."""


ENDING = (State.EXHAUSTED, State.GONE)
"""Nobody gets them; until they have left, their latest lease may settle them."""


@dataclass
class Expected:
    """What one group may expect of one message. ``handle`` is the latest lease's, ``good`` while it may settle."""

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
    """Surely: it stands in nobody's way."""


@dataclass
class Id:
    """What is known of a dedup_id: its message, since when, and whether it was tried, is stored, and is confirmed."""

    body: str
    since: float
    tried: bool = False
    stored: bool = False
    confirmed: bool = False


@dataclass
class Group:
    policy: Policy
    messages: dict[str, Expected] = field(default_factory=dict[str, Expected])
    by_handle: dict[str, Expected] = field(default_factory=dict[str, Expected])
    attempts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def having(self, *states: State) -> list[Expected]:
        return [one for one in self.messages.values() if one.state in states]

    def before(self, one: Expected) -> list[Expected]:
        """The earlier ones of its ordering key."""
        earlier: list[Expected] = []
        for other in self.messages.values():
            if other is one:
                break
            if one.key is not None and other.key == one.key:
                earlier.append(other)
        return earlier

    def on_offer(self, color: str | None) -> list[Expected]:
        """What the next pop with this filter may get, whatever is under way."""
        return [
            one
            for one in self.having(State.READY)
            if color in (None, one.color)
            and all(other.gone for other in self.before(one))
            # A delayed one may come up to a second late.
            and (one.count or not one.was_delayed)
        ]

    def visible(self, one: Expected, now: float) -> None:
        most = self.policy.max_deliveries
        one.state = State.GONE if now >= one.expires else State.READY
        if most is not None and one.count >= most:
            one.state = State.EXHAUSTED

    def wait(self, one: Expected, now: float, seconds: float) -> None:
        """Visible again after ``seconds``."""
        if seconds > 0:
            one.state, one.ends = State.WAITING, now + seconds
        else:
            self.visible(one, now)
