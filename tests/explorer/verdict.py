"""The promises, and whether every state and every path of a case keeps them.

- A member's step never leaves a queue without a consumer if a member consumes it or waits for it. If a member dies,
  stops or hangs unseen, a member that released a queue in its favour may have left it empty: this is counted, and
  allowed.
- No execution goes round forever: members and RabbitMQ come to rest in any order of steps, if each of them now and
  then takes the steps that it can always take. Without disturbances, even this condition is not needed.
- At rest, the queues are spread evenly over the members that are up, each of which waits for all others. If members
  hang, every queue has a consumer.
- At rest no step is taken, and none is taken in balance with current views.
- Without disturbances, consumers are interrupted as rarely as possible on every path. Each interruption moves a queue
  from a member with too many to a member with too few, so no queue moves twice.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from explorer.graph import Graph, components, explored, interruptions, is_fair, is_loop
from explorer.group import Case, Label, Queues, State, Status, Views
from popgate.domain.balance import QueueView

COMPLAINTS_MAX = 5


@dataclass(slots=True)
class Verdict:
    """The result. ``complaints``: broken promises, each with a way to get there."""

    case: Case
    starts: int
    states: int
    steps: int
    seconds: float
    rests: int = 0
    loops: int = 0
    fair_loops: int = 0
    """Loops in which no member forever neglects a step that it could take, above all a look."""
    gaps: int = 0
    interruptions_most: int | None = None
    """Most interruptions on any path. None: unlimited, because an idle member keeps others going round."""
    excess: int = 0
    """The most interruptions above the fewest possible, without disturbances."""
    complaints: list[str] = field(default_factory=list[str])


def judge(case: Case, *, what: Callable[[Label], Hashable] = lambda label: label[:3]) -> Verdict:
    """Explore a case and check the promises. ``what``: the obligations, as in `is_fair`."""
    began = time.monotonic()
    graph = explored(case)
    parts = components(graph)
    verdict = Verdict(case, graph.start_count, len(graph.states), len(graph.target), 0.0)
    told: dict[str, int] = {}

    def complain(text: str, state: int) -> None:
        told[text] = told.get(text, 0) + 1
        if told[text] == 1:
            verdict.complaints.append(f"{text}: {told_way(graph, state)}")

    _judge_states(graph, verdict, complain)
    loops = [part for part in parts if is_loop(graph, part)]
    verdict.loops = len(loops)
    for loop in loops:
        if is_fair(graph, loop, lambda label: None if label.befalls else what(label)):
            verdict.fair_loops += 1
            complain("goes round for ever", min(loop))
    if loops and not any(case.befalling().values()):
        complain("goes round as long as a member does nothing", min(loops[0]))
    if not loops:
        least, most = interruptions(graph, parts)
        verdict.interruptions_most = max(most[: graph.start_count])
        if not any(case.befalling().values()):
            for state in range(graph.start_count):
                queues = graph.group.queues[graph.states[state][0]]
                if not _is_settled(queues, graph.group.members):
                    continue
                fewest = fewest_moves(counts(queues, graph.group.members), case.queues)
                verdict.excess = max(verdict.excess, most[state] - fewest)
                if not least[state] == most[state] == fewest:
                    complain(f"interrupts {most[state]} times, {least[state]} at best, {fewest} would do", state)
    verdict.seconds = time.monotonic() - began
    return verdict


def _judge_states(graph: Graph, verdict: Verdict, complain: Callable[[str, int], None]) -> None:
    group, case = graph.group, graph.group.case
    untouched = case.deaths, case.stops, case.hangs
    own = [not label.befalls for label in graph.labels]
    gap = [label.gap for label in graph.labels]
    is_current = case.views is Views.CURRENT
    restless = [label.what in {"activate", "close"} for label in graph.labels]
    """A queue is between two members, or a member is about to go: this is no balance."""
    for number, state in enumerate(graph.states):
        steps = [graph.label[step] for step in graph.steps(number)]
        if any(gap[step] for step in steps):
            verdict.gaps += 1
            if state[3] == untouched:
                complain("a step leaves a queue without a member", number)
        is_at_rest = not any(own[step] for step in steps)
        verdict.rests += is_at_rest
        may_act = not is_current or Status.HUNG in state[2] or any(restless[step] for step in steps)
        if may_act and not is_at_rest:
            continue
        if is_well(group.queues[state[0]], state, group.members) != is_at_rest:
            complain("comes to rest out of balance" if is_at_rest else "acts in balance", number)


def is_well(queues: Queues, state: State, members: Sequence[str]) -> bool:
    """Tell whether the queues are spread as they should be over the members that are up."""
    up = [member for member, how in zip(members, state[2], strict=True) if how == Status.UP]
    if not up:
        return True
    if Status.HUNG in state[2]:
        return all(queue.active is not None for queue in queues)
    each = counts(queues, up).values()
    in_line = all({queue.active, *(one.member for one in queue.waiting)} == {*up} for queue in queues)
    return in_line and sum(each) == len(queues) and max(each) - min(each) <= 1


def counts(queues: Sequence[QueueView], members: Sequence[str]) -> dict[str, int]:
    """Return how many queues each of the members consumes."""
    return {member: sum(queue.active == member for queue in queues) for member in members}


def fewest_moves(each: Mapping[str, int], queue_count: int) -> int:
    """Return how many queues have to move, at least: all above the share, except those that may keep one more."""
    share, extra = divmod(queue_count, len(each))
    above = [count - share for count in each.values() if count > share]
    return sum(above) - min(extra, len(above))


def _is_settled(queues: Queues, members: Sequence[str]) -> bool:
    """Tell whether every queue has a consumer, and every member is visible to the others."""
    seen = {member for queue in queues for member in (queue.active, *(one.member for one in queue.waiting))}
    return None not in seen and seen >= {*members}


def told_way(graph: Graph, state: int) -> str:
    """Describe a shortest way to a state, and the broker's state there."""
    way = [" ".join(part for part in label[:3] if part) for label in graph.path_to(state)]
    there = [
        f"{name}={queue.active}:{''.join(f'{one.member}{one.priority or str()}' for one in queue.waiting)}"
        for name, queue in zip(graph.group.names, graph.group.queues[graph.states[state][0]], strict=True)
    ]
    return f"{'; '.join(way) or 'at the start'} -> {' '.join(there)}"
