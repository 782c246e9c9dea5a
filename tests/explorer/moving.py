"""How often consumers are interrupted until a large group is balanced: random runs instead of every possibility.

Members look every 5 s, plus or minus a fifth, at the state that a management API had up to 5 s before; a step takes 20
to 60 ms. A member knows its own changes. By production's rule it does nothing on a view that is older than its last
step.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from explorer.algorithms import ideal
from explorer.broker import Broker, Choice
from explorer.verdict import fewest_moves
from popgate.domain.balance import Handover, QueueView, Step, Verb, Waiting, decide, members_seen, plan

LOOK_SECONDS, LOOK_SPREAD = 5.0, 0.2
AGE_SECONDS = 5.0
STEP_SECONDS = 0.02, 0.06
REST_SECONDS = 40.0
"""A run ends when the group was balanced without an interruption for this many seconds."""


class Scene(Enum):
    """The start situation."""

    JOIN = "one joins"
    """All others are balanced; the newcomer is the last waiting consumer of every queue."""
    COLD = "one has all"
    """One member was there first, and all others wait for every queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The result of a run. ``seconds``: until it was balanced for good; None: not within the limit."""

    interruptions: int
    fewest: int
    seconds: float | None


def move(
    scene: Scene, queue_count: int, member_count: int, handover: Handover | None, *, seed: int, limit: float
) -> Moves:
    """One run, of ``limit`` seconds at most. ``handover``: None is the algorithm as it was published."""
    return _Run(scene, queue_count, member_count, handover, random.Random(seed)).run(limit)


class _Run:
    def __init__(
        self, scene: Scene, queue_count: int, member_count: int, handover: Handover | None, chance: random.Random
    ) -> None:
        self._handover = handover
        self._broker = Broker(handover or Handover.SOLE, Choice.LONGEST)
        self._chance = chance
        self._members = [f"m{number:02}" for number in range(member_count)]
        self._names = [f"q{number:04}" for number in range(queue_count)]
        self._queues = dict(zip(self._names, self._first(scene), strict=True))
        self._counts = dict.fromkeys(self._members, 0)
        for queue in self._queues.values():
            self._counts[queue.active or ""] += 1
        self._fewest = fewest_moves(self._counts, queue_count)
        self._seen: dict[str, tuple[float, dict[str, QueueView]]] = {}
        self._last_step = dict.fromkeys(self._members, -1.0)
        self._interruptions = 0
        self._uneven_until = self._moved_at = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0

    def _first(self, scene: Scene) -> list[QueueView]:
        first, *others = self._members
        if scene is Scene.COLD:
            return [self._queue(first, others) for _ in self._names]
        *there, newcomer = self._members
        actives = [there[number % len(there)] for number in range(len(self._names))]
        self._chance.shuffle(actives)
        return [
            self._queue(active, [*self._shuffled([one for one in there if one != active]), newcomer])
            for active in actives
        ]

    def _queue(self, active: str, line: list[str]) -> QueueView:
        return QueueView(active, 0, tuple(Waiting(one) for one in line))

    def _shuffled(self, members: list[str]) -> list[str]:
        self._chance.shuffle(members)
        return members

    def run(self, limit: float) -> Moves:
        for member in self._members:
            self._seen[member] = 0.0, dict(self._queues)
            self._at(self._chance.uniform(0, AGE_SECONDS), partial(self._is_seen, member))
            self._at(self._chance.uniform(0, LOOK_SECONDS), partial(self._look, member))
        now = 0.0
        while self._events and now < limit:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
            if not self._is_even():
                self._uneven_until = now
            if now - max(self._uneven_until, self._moved_at) > REST_SECONDS:
                break
        is_over = now < limit
        return Moves(
            interruptions=self._interruptions, fewest=self._fewest, seconds=self._uneven_until if is_over else None
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, happen))

    def _is_even(self) -> bool:
        each = self._counts.values()
        return sum(each) == len(self._queues) and max(each) - min(each) <= 1

    def _is_seen(self, me: str, now: float) -> None:
        self._seen[me] = now, dict(self._queues)
        self._at(now + AGE_SECONDS, partial(self._is_seen, me))

    def _look(self, me: str, now: float) -> None:
        pause = LOOK_SECONDS * self._chance.uniform(1 - LOOK_SPREAD, 1 + LOOK_SPREAD)
        seen_at, view = self._seen[me]
        when = now
        for step in self._steps(me, view) if seen_at > self._last_step[me] or self._handover is None else ():
            when += self._chance.uniform(*STEP_SECONDS)
            self._at(when, partial(self._do, me, step))
        self._last_step[me] = max(self._last_step[me], when if when > now else -1.0)
        self._at(max(now + pause, when), partial(self._look, me))

    def _steps(self, me: str, view: dict[str, QueueView]) -> list[Step[str]]:
        if self._handover is not None:
            moves = plan(members_seen(view.values(), me), view, self._handover)
            return decide(me, view, moves, self._handover)
        mine = [name for name, queue in self._queues.items() if queue.active == me]
        counts = dict.fromkeys(self._members, 0)
        for queue in view.values():
            counts[queue.active or ""] += 1
        counts[me] = len(mine)
        surplus = max(0, len(mine) - ideal(me, counts, len(counts), len(view)))
        released = self._chance.sample(mine, surplus)
        return [Step(verb, name) for name in released for verb in (Verb.RELEASE, Verb.SUBSCRIBE)]

    def _do(self, me: str, step: Step[str], now: float) -> None:
        before = self._queues[step.queue]
        first = self._broker.apply(before, step, me)
        then = self._broker.own_steps(first.queue)
        after = then[0].queue if then else first.queue
        if first.interrupts or (then and then[0].interrupts):
            self._interruptions += 1
            self._moved_at = now
        if before.active is not None:
            self._counts[before.active] -= 1
        if after.active is not None:
            self._counts[after.active] += 1
        self._queues[step.queue] = after
