"""All reachable states, the steps between them, and the properties of every path through them."""

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from explorer.group import Case, Group, Label, State

STATES_MAX = 4_000_000


class TooManyStatesError(Exception):
    """Raised if the case is too large to be explored."""


@dataclass(slots=True)
class Graph:
    """States are numbers, in the order in which they were found; those before ``start_count`` are start states.

    The steps from state n are those between ``first[n]`` and ``first[n + 1]``, each with its ``target`` and ``label``.
    """

    group: Group
    states: list[State]
    start_count: int
    labels: list[Label] = field(default_factory=list[Label])
    first: "array[int]" = field(default_factory=lambda: array("l", [0]))
    target: "array[int]" = field(default_factory=lambda: array("l"))
    label: "array[int]" = field(default_factory=lambda: array("H"))

    def steps(self, state: int) -> range:
        """Return the numbers of the steps from a state."""
        return range(self.first[state], self.first[state + 1])

    def path_to(self, wanted: int) -> list[Label]:
        """Return a shortest way to a state from one of the starts."""
        came: dict[int, tuple[int, int]] = {}
        line = [*range(self.start_count)]
        seen = set(line)
        for state in line:
            if state == wanted:
                break
            for step in self.steps(state):
                if (target := self.target[step]) not in seen:
                    seen.add(target)
                    came[target] = state, step
                    line.append(target)
        path: list[Label] = []
        while wanted in came:
            wanted, step = came[wanted]
            path.append(self.labels[self.label[step]])
        return path[::-1]


def explored(case: Case, *, states_max: int = STATES_MAX) -> Graph:
    """Explore every reachable state of the case. Raises: TooManyStatesError."""
    group = Group(case)
    states = [*group.starts()]
    number = {state: index for index, state in enumerate(states)}
    graph = Graph(group, states, len(states))
    labels: dict[Label, int] = {}
    for state in states:  # which grows
        for after, label in group.steps(state):
            index = number.get(after)
            if index is None:
                index = number[after] = len(states)
                states.append(after)
            graph.target.append(index)
            graph.label.append(labels.setdefault(label, len(labels)))
        graph.first.append(len(graph.target))
        if len(states) > states_max:
            raise TooManyStatesError(f"{case}: more than {states_max} states")
    graph.labels = [*labels]
    return graph


def components(graph: Graph, follows: Callable[[Label], bool] = lambda _: True) -> list[list[int]]:
    """Return the strongly connected components; those that are reached later come first (Tarjan)."""
    allowed = [follows(label) for label in graph.labels]
    first, target, label = graph.first, graph.target, graph.label
    count = len(graph.states)
    order, low, position = [0] * count, [0] * count, array("l", first[:count])
    is_open = bytearray(count)
    found: list[list[int]] = []
    line: list[int] = []
    number = 0
    for root in range(count):
        if order[root]:
            continue
        path = [root]
        while path:
            state = path[-1]
            if not order[state]:
                number += 1
                order[state] = low[state] = number
                line.append(state)
                is_open[state] = True
            step, end = position[state], first[state + 1]
            while step < end:
                after = target[step]
                if allowed[label[step]]:
                    if not order[after]:
                        break
                    if is_open[after] and order[after] < low[state]:
                        low[state] = order[after]
                step += 1
            position[state] = step
            if step < end:
                path.append(target[step])
                continue  # and back to this very step, when its target is done
            path.pop()
            if path and low[state] < low[path[-1]]:
                low[path[-1]] = low[state]
            if low[state] == order[state]:
                component: list[int] = []
                while not component or component[-1] != state:
                    component.append(line.pop())
                    is_open[component[-1]] = False
                found.append(component)
    return found


def is_fair(graph: Graph, component: Sequence[int], what: Callable[[Label], Hashable]) -> bool:
    """Tell whether all of a component can be walked forever without neglecting any step (weak fairness).

    ``what`` names the obligation that a step fulfils (None: none). An obligation that can be fulfilled in every state
    is fulfilled within the component, too.
    """
    inside = set(component)
    done: set[Hashable] = set()
    always: set[Hashable] | None = None
    for state in component:
        can = {kind for step in graph.steps(state) if (kind := what(graph.labels[graph.label[step]])) is not None}
        always = can if always is None else always & can
        done.update(
            what(graph.labels[graph.label[step]]) for step in graph.steps(state) if graph.target[step] in inside
        )
    return (always or set()) <= done


def is_loop(graph: Graph, component: Sequence[int]) -> bool:
    """Tell whether a path can go round in it."""
    return len(component) > 1 or any(graph.target[step] == component[0] for step in graph.steps(component[0]))


def interruptions(graph: Graph, order: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return for each state the fewest and the most interruptions on any path from it; ``order``: `components`, no
    loops.
    """
    least, most = [0] * len(graph.states), [0] * len(graph.states)
    weight = [int(label.interrupts) for label in graph.labels]
    first, target, label = graph.first, graph.target, graph.label
    for (state,) in order:
        steps = range(first[state], first[state + 1])
        if steps:
            least[state] = min([weight[label[step]] + least[target[step]] for step in steps])
            most[state] = max([weight[label[step]] + most[target[step]] for step in steps])
    return least, most
