"""Who shares a group's queues, learned from what the members tell each other; and from that, who consumes which queue.

Pure: is told what was heard and when. Over AMQP a consumer learns that a queue is its own by the first delivery only,
and an idle queue delivers nothing. But those in line are served in their order, and each says whom it knew to be in
line before it joined ("behind"). So who is behind nobody that is still there comes first: that one says so itself, and
the others believe it. Where two joined without knowing of each other, all but one of them join anew, behind the other;
such a queue is idle, or a delivery would have told.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from popgate_client.amqp.balance import QueueView, Waiting


class Spot(NamedTuple):
    """A member's place in the line of a queue, as it is told to others. `behind`: the tags of those before it."""

    queue: str
    tag: str
    priority: int
    behind: frozenset[str]
    is_active: bool


class Statement(NamedTuple):
    """All that a member says of itself; `version` grows with each change. Who leaves is no member any more."""

    member: str
    version: int
    is_member: bool
    spots: tuple[Spot, ...]


class Sight(NamedTuple):
    """A view for the plan: the `members`, sorted, and their consumers with their tags."""

    members: Sequence[str]
    queues: Mapping[str, QueueView]
    tags: Mapping[str, frozenset[str]]
    """Of each member."""
    active_tags: frozenset[str]


class Order(Enum):
    """Where a place stands in its line."""

    FIRST = "first"
    BEHIND = "behind"
    UNKNOWN = "unknown"
    """Another one, who takes precedence in such cases, joined at the same time."""
    UNKNOWN_BUT_STAYS = "unknown, but stays"


class Roster:
    """What was heard of the others."""

    def __init__(self) -> None:
        self._statements: dict[str, Statement] = {}
        self._heard_at: dict[str, float] = {}

    def hear(self, statement: Statement, now: float) -> bool:
        """Take in what a member says; True where it is news."""
        self._heard_at[statement.member] = now
        known = self._statements.get(statement.member)
        if known is not None and known.version >= statement.version:
            return False
        self._statements[statement.member] = statement
        return True

    def hear_beat(self, member: str, version: int, now: float) -> bool:
        """A member lives; True where what it says of itself was missed."""
        self._heard_at[member] = now
        known = self._statements.get(member)
        return known is None or known.version < version

    def silent(self, now: float, seconds: float) -> list[str]:
        """The members of whom nothing was heard for so long."""
        return [member for member, heard_at in self._heard_at.items() if now - heard_at >= seconds]

    def drop(self, member: str) -> bool:
        """It is gone with all its consumers; False where that is no news."""
        self._heard_at.pop(member, None)
        return self._statements.pop(member, None) is not None

    def tags(self, queue: str) -> frozenset[str]:
        """Of all others in the line of this queue."""
        return frozenset(spot.tag for spot in self.spots(queue))

    def sight(self, me: Statement, queues: Iterable[str]) -> Sight:
        """The view in which I stand as `me` says."""
        statements = [*self._statements.values(), me]
        lines: dict[str, list[tuple[str, Spot]]] = {queue: [] for queue in queues}
        for statement in statements:
            for spot in statement.spots:
                if spot.queue in lines:
                    lines[spot.queue].append((statement.member, spot))
        active = {queue: _active(line) for queue, line in lines.items()}
        return Sight(
            members=sorted(statement.member for statement in statements if statement.is_member),
            queues={queue: _view(line, active[queue]) for queue, line in lines.items()},
            tags={one.member: frozenset(spot.tag for spot in one.spots) for one in statements},
            active_tags=frozenset(spot.tag for spot in active.values() if spot is not None),
        )

    def spots(self, queue: str) -> list[Spot]:
        """The places of all others in the line of this queue."""
        return [spot for one in self._statements.values() for spot in one.spots if spot.queue == queue]

    def is_taken(self, queue: str) -> bool:
        """Whether one of the others consumes it, as it says."""
        return any(spot.is_active for spot in self.spots(queue))

    def order(self, mine: Spot, *, takes: bool) -> Order:
        """Where my place stands, of which RabbitMQ has not told. `takes`: a higher priority takes over at once, as on
        quorum queues of RabbitMQ 4; elsewhere it only comes next."""
        others = self.spots(mine.queue)
        for spot in others:
            stood_before = spot.tag in mine.behind and not (takes and spot.priority < mine.priority)
            if spot.is_active or spot.priority > mine.priority or stood_before:
                return Order.BEHIND
        rivals = [spot for spot in others if spot.priority == mine.priority]
        tags = {mine.tag, *(spot.tag for spot in rivals)}
        heads = [spot.tag for spot in rivals if not spot.behind & tags]
        if not heads:
            return Order.FIRST
        return Order.UNKNOWN_BUT_STAYS if mine.tag < min(heads) else Order.UNKNOWN


def _active(line: Sequence[tuple[str, Spot]]) -> Spot | None:
    """Who says that it is; of two, for a moment, the one with the higher priority, or nobody can know."""
    claims = [spot for _, spot in line if spot.is_active]
    highest = max((spot.priority for spot in claims), default=0)
    first = [spot for spot in claims if spot.priority == highest]
    return first[0] if len(first) == 1 else None


def _view(line: Sequence[tuple[str, Spot]], active: Spot | None) -> QueueView:
    waiting = tuple(Waiting(member, spot.priority) for member, spot in line if spot is not active)
    holder = next((member for member, spot in line if spot is active), None)
    return QueueView(holder, active.priority if active else 0, waiting)
