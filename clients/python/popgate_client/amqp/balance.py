"""Who should own which queue: one pure plan, made by everybody from one view.

Theory of operation. Every member sees the same view, makes the same plan, and carries out its own part of it: who has
too many lets go of what the plan gives away, who has too few takes what the plan gives him. Nobody leads, and nobody
has to be told. The plan gives each queue away at most once and moves as few as possible:

- Each of n members may have the n-th part of the queues, rounded down, and some of them one more. Those are, in the
  order of their names, members who have more than that already, and only then the others: quotas do not change while a
  plan is half done.
- What nobody has or waits for is given first; then, from those above their quota, in the order of the queues' names:
  first to whom the queue goes anyway (it is the next in line), then to one who waits for it, then to anybody.
- While some queue is on its way between two (several wait, and nobody can know who gets it), nothing else is moved.

The same plan serves members that share a state store (their queues have owners and no lines), and programs that see no
more than a broker's list of consumers: they stand in every queue's line, and ``decide`` says what one of them does for
the plan. ``Driver`` says how RabbitMQ hands a queue with a single active consumer over. Views may be old: what is done
for them is late or in vain, and RabbitMQ still has one active consumer a queue.

This file is also a module of the client (``popgate_client.amqp.balance``), which knows nothing of the proxy: it
imports the standard library only.
Source: the leaderless rebalancing of rabbit_leaderless_rebalancing (TLA+), corrected: there a queue could move twice,
and members that are slow to subscribe made others release for ever.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Q = TypeVar("Q", bound=str)

HOLD_OFF_SECONDS = 15.0
"""How long a queue that nobody consumes is left to whom the plan gives it: three looks, each at most 5 s old."""


class Driver(Enum):
    """How a queue goes from one consumer to another."""

    TAKE = "take"
    """Who subscribes with a higher priority is given it (quorum queues, RabbitMQ 4.0 and newer)."""
    CLAIM = "claim"
    """Who has the highest priority of those that wait gets it when its consumer leaves (classic queues)."""
    SOLE = "sole"
    """Who has waited longest gets it when its consumer leaves: all others step aside (quorum queues before 4.0)."""


class Waiting(NamedTuple):
    """One who is in line for a queue."""

    member: str
    priority: int = 0


class QueueView(NamedTuple):
    """Who consumes a queue, and who waits for it. ``priority`` is that of the active one."""

    active: str | None = None
    priority: int = 0
    waiting: tuple[Waiting, ...] = ()


class Verb(Enum):
    """What a member does about a queue."""

    SUBSCRIBE = "subscribe"
    """Consume it, with the priority given, on a channel of its own."""
    CLAIM = "claim"
    """Consume it anew, with the priority given; then close the channel with which it waits."""
    RELEASE = "release"
    """Start nothing new, settle what is at work, and close the channel; do not cancel first: order would be lost."""
    YIELD = "yield"
    """Wait for it no longer: close the channel."""


class Step(NamedTuple, Generic[Q]):
    """One thing to do. ``priority`` is for a verb that consumes."""

    verb: Verb
    queue: Q
    priority: int = 0


def next_in_line(waiting: Sequence[Waiting]) -> str | None:
    """Who gets the queue next, where that can be known without knowing since when they wait."""
    if not waiting:
        return None
    highest = max(one.priority for one in waiting)
    first = [one.member for one in waiting if one.priority == highest]
    return first[0] if len(first) == 1 else None


def holder(view: QueueView, driver: Driver) -> str | None:
    """Who has the queue, or is about to. None: nobody, or nobody can know who."""
    active, priority, waiting = view
    is_taken = driver is Driver.TAKE and any(one.priority > priority for one in waiting)
    return next_in_line(waiting) if active is None or is_taken else active


def quotas(members: Sequence[str], counts: Mapping[str, int], queue_count: int) -> dict[str, int]:
    """How many queues each of the ``members``, who are sorted, should have; ``counts``: how many it has."""
    share, extra_count = divmod(queue_count, len(members))
    rich = [member for member in members if counts[member] > share]
    poor = [member for member in members if counts[member] <= share]
    extra = {*[*rich, *poor][:extra_count]}
    return {member: share + (member in extra) for member in members}


def plan(members: Sequence[str], queues: Mapping[Q, QueueView], driver: Driver = Driver.SOLE) -> dict[Q, str]:
    """Who is to get which queue: as few moves as there can be, and one for each queue that nobody has.

    ``members``: sorted, at least one. What is held by somebody who is no member stays with him, and counts for nobody.
    """
    names = sorted(queues)
    holders = {name: holder(queues[name], driver) for name in names}
    counts = dict.fromkeys(members, 0)
    for name in names:
        if (has := holders[name]) in counts:
            counts[has] += 1
    quota = quotas(members, counts, len(queues))
    due = {member: quota[member] - counts[member] for member in members}
    """So many each has too few, or too many where it is negative; as it will be after the moves."""
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
    """Who takes part, sorted: whoever consumes a queue or waits for one, and ``me``."""
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
    driver: Driver,
    *,
    overdue: Collection[Q] = (),
) -> list[Step[Q]]:
    """What ``me`` does, in the order of the queues' names, that the plan ``moves`` of the view ``queues`` come about.

    ``overdue``: queues that have had nobody for `HOLD_OFF_SECONDS`: who was to have them first may hang, and does not
    keep the others from them any longer. A view that does not show what ``me`` did last is no ground for a decision.
    """
    steps = [_step(me, name, queues[name], moves.get(name), driver, name in overdue) for name in sorted(queues)]
    return [step for step in steps if step is not None]


def _step(me: str, name: Q, queue: QueueView, to: str | None, driver: Driver, is_overdue: bool) -> Step[Q] | None:
    active, active_priority, waiting = queue
    is_orphan = active is None and not waiting
    is_moved = to is not None and to != me
    above = 1 + max((one.priority for one in waiting), default=0)
    if driver is Driver.TAKE and active is not None:
        above = max(above, active_priority + 1)
    if active == me:
        # Never before it is known that the receiver comes next: the queue would go to anybody, or to nobody.
        is_ready = is_moved and driver is not Driver.TAKE and next_in_line(waiting) == to
        return Step(Verb.RELEASE, name) if is_ready else None
    if any(one.member == me for one in waiting):
        if to == me and (driver is Driver.TAKE or (driver is Driver.CLAIM and next_in_line(waiting) != me)):
            return Step(Verb.CLAIM, name, above)
        return Step(Verb.YIELD, name) if is_moved and driver is Driver.SOLE else None
    if to == me:
        return Step(Verb.SUBSCRIBE, name, 0 if is_orphan or driver is Driver.SOLE else above)
    # Who is to be first in line is let go first, where the one who comes first is served first.
    must_hold_off = is_moved and not is_overdue and (is_orphan or driver is Driver.SOLE)
    return None if must_hold_off else Step(Verb.SUBSCRIBE, name)


def _next(queue: QueueView) -> list[str]:
    first = next_in_line(queue.waiting)
    return [] if first is None else [first]


def _waiting(queue: QueueView) -> list[str]:
    return sorted(one.member for one in queue.waiting)
