"""Derives from the members' statements which members share a group's queues, and which of them consumes which queue.

Pure: statements and times are passed in. Over AMQP a consumer learns only from its first delivery that it is the active
one, and an idle queue delivers nothing. But consumers are served in the order in which they joined the line, and each
states which others it knew to be in line before it ("behind"). So a consumer is first if none of those is still there:
it states this itself, and the others believe it. If two joined without knowing of each other, all but one of them leave
and join again, behind the other; such a queue is idle, because otherwise a delivery would have decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from popgate_client.amqp.balance import QueueView, Waiting


class Spot(NamedTuple):
    """A member's place in the line of a queue, as stated to others. `behind`: the tags of the places before it."""

    queue: str
    tag: str
    priority: int
    behind: frozenset[str]
    is_active: bool


class Statement(NamedTuple):
    """The state that a member sends; `version` grows with each change. `is_member` is False once it leaves."""

    member: str
    version: int
    is_member: bool
    spots: tuple[Spot, ...]


class GroupView(NamedTuple):
    """A view for the plan: the sorted `members`, the queues, and the consumer tags."""

    members: Sequence[str]
    queues: Mapping[str, QueueView]
    tags: Mapping[str, frozenset[str]]
    """The tags of each member's consumers."""
    active_tags: frozenset[str]


class Order(Enum):
    """The position of a place in its line."""

    FIRST = "first"
    BEHIND = "behind"
    UNKNOWN = "unknown"
    """Another consumer, which takes precedence, joined at the same time."""
    UNKNOWN_BUT_STAYS = "unknown, but stays"


class Roster:
    """Holds the latest statements of the other members."""

    def __init__(self) -> None:
        self._statements: dict[str, Statement] = {}
        self._heard_at: dict[str, float] = {}

    def hear(self, statement: Statement, now: float) -> bool:
        """Record a statement; True if it is newer than the known one."""
        self._heard_at[statement.member] = now
        known = self._statements.get(statement.member)
        if known is not None and known.version >= statement.version:
            return False
        self._statements[statement.member] = statement
        return True

    def hear_beat(self, member: str, version: int, now: float) -> bool:
        """Record a heartbeat; True if a statement of this member was missed."""
        self._heard_at[member] = now
        known = self._statements.get(member)
        return known is None or known.version < version

    def silent(self, now: float, seconds: float) -> list[str]:
        """Return the members that have sent nothing for `seconds`."""
        return [member for member, heard_at in self._heard_at.items() if now - heard_at >= seconds]

    def drop(self, member: str) -> bool:
        """Remove a member with all its consumers; False if it had no statement."""
        self._heard_at.pop(member, None)
        return self._statements.pop(member, None) is not None

    def tags(self, queue: str) -> frozenset[str]:
        """Return the tags of all other members' places in the line of this queue."""
        return frozenset(spot.tag for spot in self.spots(queue))

    def group_view(self, me: Statement, queues: Iterable[str]) -> GroupView:
        """Return the view of all statements, including this member's (`me`)."""
        statements = [*self._statements.values(), me]
        lines: dict[str, list[tuple[str, Spot]]] = {queue: [] for queue in queues}
        for statement in statements:
            for spot in statement.spots:
                if spot.queue in lines:
                    lines[spot.queue].append((statement.member, spot))
        active = {queue: _active(line) for queue, line in lines.items()}
        return GroupView(
            members=sorted(statement.member for statement in statements if statement.is_member),
            queues={queue: _view(line, active[queue]) for queue, line in lines.items()},
            tags={one.member: frozenset(spot.tag for spot in one.spots) for one in statements},
            active_tags=frozenset(spot.tag for spot in active.values() if spot is not None),
        )

    def spots(self, queue: str) -> list[Spot]:
        """Return all other members' places in the line of this queue."""
        return [spot for one in self._statements.values() for spot in one.spots if spot.queue == queue]

    def is_taken(self, queue: str) -> bool:
        """Whether another member states that it consumes this queue."""
        return any(spot.is_active for spot in self.spots(queue))

    def order(self, mine: Spot, *, takes: bool) -> Order:
        """Return the position of a place of this member to which RabbitMQ has delivered nothing yet. `takes`: a
        consumer with a higher priority takes over at once, as on quorum queues of RabbitMQ 4; otherwise it is next."""
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
    """Return the place that claims to be active. If several do for a moment, return the one with the highest priority;
    None if that does not decide."""
    claims = [spot for _, spot in line if spot.is_active]
    highest = max((spot.priority for spot in claims), default=0)
    first = [spot for spot in claims if spot.priority == highest]
    return first[0] if len(first) == 1 else None


def _view(line: Sequence[tuple[str, Spot]], active: Spot | None) -> QueueView:
    waiting = tuple(Waiting(member, spot.priority) for member, spot in line if spot is not active)
    holder = next((member for member, spot in line if spot is active), None)
    return QueueView(holder, active.priority if active else 0, waiting)
