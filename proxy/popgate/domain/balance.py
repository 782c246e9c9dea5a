"""Plans which member should own which queue, as a pure function of the members and queues that every member sees.

Theory of operation. Every member sees the same view of the queues, computes the same plan, and carries out the part of
the plan that concerns it. A member with too many queues releases the queues that the plan moves away. A member with too
few queues takes the queues that the plan assigns to it. There is no leader, and members need not communicate. The plan
moves each queue at most once, and as few queues as possible:

- With n members, each member's quota is the n-th part of the queues, rounded down. The remaining queues raise some
  members' quotas by one. These are first the members that already have more than the rounded n-th part, then the other
  members, both in the order of their names. So quotas do not change while a plan is half done.
- Queues that have neither an owner nor a waiting member are assigned first. Then queues move from members above their
  quota to members below their quota. Three passes consider these queues in the order of their names. The first pass
  moves a queue only to the member that is next in line for it, the second only to a member that waits for it, the third
  to any member.
- While a queue is in transit, no queue moves from one member to another. A queue is in transit if members wait for it,
  but its next owner can't be known.

The same plan serves two kinds of members. Members that share a state store see an owner or no owner for each queue, and
no waiting members. Programs that see only a broker's list of consumers subscribe to every queue and wait until they
become its active consumer. For such a program, ``decide`` returns the actions that carry out its part of the plan.
``Handover`` describes how RabbitMQ passes a queue with a single active consumer to the next consumer. A view may be
outdated. An action that follows from an outdated view is late or has no effect, and RabbitMQ still allows only one
active consumer per queue.

The Python client has a copy of this file (``popgate_client.amqp.balance``). The client does not depend on the proxy, so
this file imports only the standard library.

Source: the TLA+ specification rabbit_leaderless_rebalancing, with two corrections. In the specification, a queue could
move twice, and members that were slow to subscribe made other members release queues for ever.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Q = TypeVar("Q", bound=str)

HOLD_OFF_SECONDS = 15.0
"""Seconds for which a queue without a consumer is reserved for the member that the plan chose. This covers three views
of the queues, each at most 5 s old."""


class Handover(Enum):
    """How RabbitMQ passes a queue from its active consumer to the next one."""

    TAKE = "take"
    """A consumer with a higher priority becomes the active consumer as soon as it subscribes (quorum queues, from
    RabbitMQ 4.0 on)."""
    CLAIM = "claim"
    """When the active consumer leaves, the waiting consumer with the highest priority becomes active (classic
    queues)."""
    SOLE = "sole"
    """When the active consumer leaves, the consumer that has waited longest becomes active. So every member that should
    not get the queue must stop waiting for it (quorum queues before RabbitMQ 4.0)."""


class Waiting(NamedTuple):
    """A member that waits for a queue, and the priority of its consumer."""

    member: str
    priority: int = 0


class QueueView(NamedTuple):
    """The consumers of one queue: the active consumer with its priority, and the members that wait."""

    active: str | None = None
    priority: int = 0
    waiting: tuple[Waiting, ...] = ()


class Verb(Enum):
    """An action of a member on a queue."""

    SUBSCRIBE = "subscribe"
    """Consume the queue with ``Step.priority`` on a separate channel."""
    CLAIM = "claim"
    """Consume the queue with ``Step.priority`` on a second channel, then close the channel on which the member
    waited."""
    RELEASE = "release"
    """Process no further messages, settle the messages in progress, then close the channel. Don't cancel the consumer
    before this, because a cancelled consumer loses the order of the messages."""
    YIELD = "yield"
    """Stop waiting for the queue: close the channel."""


class Step(NamedTuple, Generic[Q]):
    """One action of a member. ``priority`` is the consumer priority for SUBSCRIBE and CLAIM."""

    verb: Verb
    queue: Q
    priority: int = 0


def next_in_line(waiting: Sequence[Waiting]) -> str | None:
    """Return the waiting member that gets the queue next.

    Return None if no member waits, or if the next one depends on how long the members have waited.
    """
    if not waiting:
        return None
    highest = max(one.priority for one in waiting)
    first = [one.member for one in waiting if one.priority == highest]
    return first[0] if len(first) == 1 else None


def holder(view: QueueView, handover: Handover) -> str | None:
    """Return the member that owns the queue or is about to own it.

    Return None if there is no such member, or if it can't be known.
    """
    active, priority, waiting = view
    is_taken = handover is Handover.TAKE and any(one.priority > priority for one in waiting)
    return next_in_line(waiting) if active is None or is_taken else active


def quotas(members: Sequence[str], counts: Mapping[str, int], queue_count: int) -> dict[str, int]:
    """Return how many queues each of the sorted ``members`` should have. ``counts``: how many queues each member has
    now."""
    share, extra_count = divmod(queue_count, len(members))
    rich = [member for member in members if counts[member] > share]
    poor = [member for member in members if counts[member] <= share]
    extra = {*[*rich, *poor][:extra_count]}
    return {member: share + (member in extra) for member in members}


def plan(members: Sequence[str], queues: Mapping[Q, QueueView], handover: Handover = Handover.SOLE) -> dict[Q, str]:
    """Return the queues that should get a new owner, each with this owner.

    The plan moves as few queues as possible, and assigns the queues that have no owner. ``members`` must be sorted and
    not empty. A queue whose holder is not in ``members`` stays with this holder, and is not counted for any member.
    """
    names = sorted(queues)
    holders = {name: holder(queues[name], handover) for name in names}
    counts = dict.fromkeys(members, 0)
    for name in names:
        if (has := holders[name]) in counts:
            counts[has] += 1
    quota = quotas(members, counts, len(queues))
    due = {member: quota[member] - counts[member] for member in members}
    """How many queues each member lacks after the moves planned so far; negative if the member has too many."""
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
    """Return ``me`` and all members that consume a queue or wait for a queue, sorted."""
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
    """Return the actions of member ``me`` that carry out the plan ``moves``, sorted by queue name.

    ``queues``: the view from which ``moves`` was planned. It must already show the last action of ``me``. ``overdue``:
    queues that have had no consumer for `HOLD_OFF_SECONDS`. The member that the plan chose for such a queue may hang,
    so ``me`` subscribes without waiting for that member.
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
        # Release only when the planned owner is known to be next, because otherwise any member, or none, would get it.
        is_ready = is_moved and handover is not Handover.TAKE and next_in_line(waiting) == to
        return Step(Verb.RELEASE, name) if is_ready else None
    if any(one.member == me for one in waiting):
        if to == me and (handover is Handover.TAKE or (handover is Handover.CLAIM and next_in_line(waiting) != me)):
            return Step(Verb.CLAIM, name, above)
        return Step(Verb.YIELD, name) if is_moved and handover is Handover.SOLE else None
    if to == me:
        return Step(Verb.SUBSCRIBE, name, 0 if is_orphan or handover is Handover.SOLE else above)
    # The first member to subscribe gets the queue, so the planned owner has to subscribe before the others.
    must_hold_off = is_moved and not is_overdue and (is_orphan or handover is Handover.SOLE)
    return None if must_hold_off else Step(Verb.SUBSCRIBE, name)


def _next(queue: QueueView) -> list[str]:
    first = next_in_line(queue.waiting)
    return [] if first is None else [first]


def _waiting(queue: QueueView) -> list[str]:
    return sorted(one.member for one in queue.waiting)
