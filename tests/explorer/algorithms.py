"""The algorithms to explore: production's code, the algorithm as it was published, and production's with planted
mistakes.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from explorer.broker import is_on
from popgate.domain import balance
from popgate.domain.balance import Handover, QueueView, Step, Verb

View = Mapping[str, QueueView]
Algorithm = Callable[[str, Sequence[str], View, Handover, Collection[str]], list[Step[str]]]
"""What a member does: its name, all who were started and don't stop, what it sees, how queues go over, the overdue."""


def production(me: str, _: Sequence[str], view: View, handover: Handover, overdue: Collection[str]) -> list[Step[str]]:
    """``popgate.domain.balance``. It knows only of those who are on a queue."""
    moves = balance.plan(balance.members_seen(view.values(), me), view, handover)
    return balance.decide(me, view, moves, handover, overdue=overdue)


def with_presence(
    me: str, started: Sequence[str], view: View, handover: Handover, overdue: Collection[str]
) -> list[Step[str]]:
    """The same where members tell each other that they are there, and when they go."""
    return balance.decide(me, view, balance.plan(started, view, handover), handover, overdue=overdue)


def changed(old: str, new: str) -> Algorithm:
    """Return production's source with one place replaced."""
    source = inspect.getsource(balance)
    assert source.count(old) == 1, f"not once in the source: {old}"
    module: Any = ModuleType("changed_balance")
    exec(source.replace(old, new), module.__dict__)

    def decided(me: str, _: Sequence[str], view: View, handover: Handover, overdue: Collection[str]) -> list[Step[str]]:
        how = module.Handover(handover.value)  # the copy has its own
        moves = module.plan(module.members_seen(view.values(), me), view, how)
        steps = module.decide(me, view, moves, how, overdue=overdue)
        return [Step(Verb(step.verb.value), step.queue, step.priority) for step in steps]

    return decided


def published(me: str, started: Sequence[str], view: View, _: Handover, __: Collection[str] = ()) -> list[Step[str]]:
    """rabbit_leaderless_rebalancing as it was published: subscribe everywhere, let go of what is above the ideal.

    It may release any of its queues, one after the other, while it has more than the ideal.
    """
    counts = {member: sum(queue.active == member for queue in view.values()) for member in started}
    subscribed = sum(any(is_on(queue, member) for queue in view.values()) for member in started)
    is_over = counts[me] > ideal(me, counts, max(1, subscribed), len(view))
    steps: list[Step[str]] = []
    for name, queue in view.items():
        if queue.active == me:
            if is_over:
                steps.append(Step(Verb.RELEASE, name))
        elif all(one.member != me for one in queue.waiting):
            steps.append(Step(Verb.SUBSCRIBE, name))
    return steps


def ideal(me: str, counts: Mapping[str, int], subscribed: int, queue_count: int) -> int:
    """Return the published ideal: the n-th part, and one more for the first members when ordered by how many they
    have. Two members that have equally many both come after the other, as in the original, whose comparison of
    application ids never decides anything.
    """
    share, left_over = divmod(queue_count, subscribed)
    before = sum(counts[other] >= max(1, counts[me]) for other in counts if other != me) if counts[me] else -1
    return share + (left_over > 0 and left_over >= before + 1)
