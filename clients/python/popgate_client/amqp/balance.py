"""Plans which member should own which queue: a pure function that every member applies to the same view.

Theory of operation. Every member sees the same view, computes the same plan and carries out its own part of it. A
member with too many queues releases the queues that the plan moves away; a member with too few takes the queues that
the plan gives it. There is no leader, and members need not talk to each other. The plan moves each queue at most once,
and as few queues as possible:

- With n members, each one's quota is the n-th part of the queues, rounded down; some members get one more. Members that
  already have more than the n-th part get the extra queue first, in the order of their names, then the others. So
  quotas do not change while a plan is half done.
- Queues that have neither an owner nor a waiting member are assigned first. Then members above their quota give queues
  away, in the order of the queues' names: first to the member that is next in line anyway, then to one that waits for
  the queue, then to any member.
- While a queue is in transit (several members wait, and the next owner can't be known), no other queue is moved.

The same plan serves two kinds of members. Members that share a state store have queues with owners and without waiting
lines. Programs that see only a broker's list of consumers wait in line for every queue, and ``decide`` returns what one
of them does for the plan. ``Handover`` says how RabbitMQ hands over a queue with a single active consumer. A view may
be old. An action that follows from an old view is late or has no effect, and RabbitMQ still allows one active consumer
per queue.

The client has a copy of this file (``popgate_client.amqp.balance``), which does not depend on the proxy: it imports the
standard library only.
Source: the leaderless rebalancing of rabbit_leaderless_rebalancing (TLA+), corrected: there a queue could move twice,
and members that are slow to subscribe made others release for ever.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Q = TypeVar("Q", bound=str)

HOLD_OFF_SECONDS = 15.0
"""Seconds for which a queue without a consumer is reserved for the member that the plan chose: three looks, each at
most 5 s old."""


class Handover(Enum):
    """How a queue goes from one consumer to another."""

    TAKE = "take"
    """A consumer with a higher priority takes the queue as soon as it subscribes (quorum queues, RabbitMQ 4.0 on)."""
    CLAIM = "claim"
    """When the consumer leaves, the waiting consumer with the highest priority gets the queue (classic queues)."""
    SOLE = "sole"
    """When the consumer leaves, the one that has waited longest gets the queue, so that all others must stop waiting
    (quorum queues before 4.0)."""


class Waiting(NamedTuple):
    """A member that waits for a queue."""

    member: str
    priority: int = 0


class QueueView(NamedTuple):
    """The active consumer of a queue, its priority, and the waiting members."""

    active: str | None = None
    priority: int = 0
    waiting: tuple[Waiting, ...] = ()


class Verb(Enum):
    """An action of a member on a queue."""

    SUBSCRIBE = "subscribe"
    """Consume the queue with the given priority on a separate channel."""
    CLAIM = "claim"
    """Consume the queue again with the given priority, then close the channel that waited."""
    RELEASE = "release"
    """Start nothing new, settle messages in progress, and close the channel. Don't cancel first: that loses order."""
    YIELD = "yield"
    """Stop waiting for the queue: close the channel."""


class Step(NamedTuple, Generic[Q]):
    """One action. ``priority`` applies to a verb that consumes."""

    verb: Verb
    queue: Q
    priority: int = 0


def next_in_line(waiting: Sequence[Waiting]) -> str | None:
    """Return the member that gets the queue next; None if that depends on how long the members have waited."""
    if not waiting:
        return None
    highest = max(one.priority for one in waiting)
    first = [one.member for one in waiting if one.priority == highest]
    return first[0] if len(first) == 1 else None


def holder(view: QueueView, handover: Handover) -> str | None:
    """Return the member that has the queue or is about to get it; None if there is none or it can't be known."""
    active, priority, waiting = view
    is_taken = handover is Handover.TAKE and any(one.priority > priority for one in waiting)
    return next_in_line(waiting) if active is None or is_taken else active


def quotas(members: Sequence[str], counts: Mapping[str, int], queue_count: int) -> dict[str, int]:
    """Return how many queues each of the sorted ``members`` should have. ``counts``: how many it has."""
    share, extra_count = divmod(queue_count, len(members))
    rich = [member for member in members if counts[member] > share]
    poor = [member for member in members if counts[member] <= share]
    extra = {*[*rich, *poor][:extra_count]}
    return {member: share + (member in extra) for member in members}


def plan(members: Sequence[str], queues: Mapping[Q, QueueView], handover: Handover = Handover.SOLE) -> dict[Q, str]:
    """Return the new owner of each queue that should move: as few moves as possible, plus one for each unowned queue.

    ``members``: sorted, at least one. A queue whose holder is not a member stays with it and counts for no member.
    """
    names = sorted(queues)
    holders = {name: holder(queues[name], handover) for name in names}
    counts = dict.fromkeys(members, 0)
    for name in names:
        if (has := holders[name]) in counts:
            counts[has] += 1
    quota = quotas(members, counts, len(queues))
    due = {member: quota[member] - counts[member] for member in members}
    """How many queues each member lacks after the moves so far; negative if it has too many."""
    moves: dict[Q, str] = {}

    def give(name: Q, to: str) -> None:
        moves[name] = to
        due[to] -= 1
        if (giver := holders[name]) is not None:
            due[giver] += 1

    def wants(candidates: Iterable[str]) -> str | None:
        return next((member for member in candidates if due.get(member, 0) > 0), None)

    for name in names:
        if holders[name] is None and not queues[name].waiting and (to := wants(members)) is not None:
            give(name, to)
    if any(holders[name] not in counts and queues[name].waiting for name in names):
        return moves
    rich = [name for name in names if (has := queues[name].active) in due and has == holders[name]]
    choices: list[Callable[[QueueView], Sequence[str]]] = [_next, _waiting, lambda _: members]
    for candidates in choices:
        for name in rich:
            if name not in moves and due[holders[name] or ""] < 0 and (to := wants(candidates(queues[name]))):
                give(name, to)
    return moves


def members_seen(queues: Iterable[QueueView], me: str) -> list[str]:
    """Return the members that take part, sorted: all that consume a queue or wait for one, and ``me``."""
    seen = {me}
    for queue in queues:
        seen.update(one.member for one in queue.waiting)
        if queue.active is not None:
            seen.add(queue.active)
    return sorted(seen)


def decide(
    me: str,
    queues: Mapping[Q, QueueView],
    moves: Mapping[Q, str],
    handover: Handover,
    *,
    overdue: Collection[Q] = (),
) -> list[Step[Q]]:
    """Return what ``me`` does to carry out the plan ``moves`` of the view ``queues``, sorted by queue name.

    ``overdue``: queues without a consumer for `HOLD_OFF_SECONDS`. The member that the plan chose may hang, so the
    others no longer hold off. Don't call this with a view that does not yet show the last action of ``me``.
    """
    steps = [_step(me, name, queues[name], moves.get(name), handover, name in overdue) for name in sorted(queues)]
    return [step for step in steps if step is not None]


def _step(me: str, name: Q, queue: QueueView, to: str | None, handover: Handover, is_overdue: bool) -> Step[Q] | None:
    active, active_priority, waiting = queue
    is_orphan = active is None and not waiting
    is_moved = to is not None and to != me
    above = 1 + max((one.priority for one in waiting), default=0)
    if handover is Handover.TAKE and active is not None:
        above = max(above, active_priority + 1)
    if active == me:
        # Release only when the receiver is known to be next: otherwise any member, or none, would get the queue.
        is_ready = is_moved and handover is not Handover.TAKE and next_in_line(waiting) == to
        return Step(Verb.RELEASE, name) if is_ready else None
    if any(one.member == me for one in waiting):
        if to == me and (handover is Handover.TAKE or (handover is Handover.CLAIM and next_in_line(waiting) != me)):
            return Step(Verb.CLAIM, name, above)
        return Step(Verb.YIELD, name) if is_moved and handover is Handover.SOLE else None
    if to == me:
        return Step(Verb.SUBSCRIBE, name, 0 if is_orphan or handover is Handover.SOLE else above)
    # If the first to subscribe is served first, the plan's member has to subscribe before the others.
    must_hold_off = is_moved and not is_overdue and (is_orphan or handover is Handover.SOLE)
    return None if must_hold_off else Step(Verb.SUBSCRIBE, name)


def _next(queue: QueueView) -> list[str]:
    first = next_in_line(queue.waiting)
    return [] if first is None else [first]


def _waiting(queue: QueueView) -> list[str]:
    return sorted(one.member for one in queue.waiting)
