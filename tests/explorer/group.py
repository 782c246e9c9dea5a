"""A group of members on one broker: every state that it can get into, and every step from each.

A state consists of the broker's queues, each member's last view of them (with its own changes since), and each member's
status. A step is one action: a member takes one step of its decision or looks at the broker; RabbitMQ activates one
queue's next consumer; or, a limited number of times, a member dies, stops, hangs or is started.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, TypeVar

from explorer.algorithms import Algorithm, production
from explorer.broker import After, Broker, Choice, is_on
from popgate.domain.balance import Handover, QueueView, Step, Verb, Waiting

T = TypeVar("T")
Queues = tuple[QueueView, ...]
State = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, int, int]]
"""The broker; each member's view (absent if views are current), status; deaths, stops and hangs still to come."""

NAMES = "abcdefgh"
CLOSE = Verb.RELEASE
"""A stopping member closes its channel, whatever its role on the queue."""


class Views(Enum):
    """The views on which members decide."""

    CURRENT = "current"
    """The broker as it is."""
    STALE = "stale"
    """The broker at any earlier moment, with the member's own changes since."""
    TORN = "torn"
    """The same, with each queue as of a different moment."""
    BLIND = "blind"
    """The broker at any earlier moment, without the member's own changes since: production never decides on such a
    view.
    """


class Start(Enum):
    """The states in which the exploration starts."""

    EMPTY = "empty"
    """No member is on any queue."""
    ALL_ON_ONE = "all on one"
    """One member has every queue, the others wait for all of them."""
    SUBSCRIBED = "subscribed"
    """Every member has any queues, and waits for all others."""
    ANY = "any"
    """Every queue has any member or none as consumer, and any of the others wait for it."""


class Status(IntEnum):
    """The status of a member. Order: members that act, then members that hold something, then the others."""

    UP = 0
    STOPPING = 1
    HUNG = 2
    DOWN = 3
    """It will be started, at any time."""
    GONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case to explore. ``joiners``: number of members that are started only later."""

    queues: int
    members: int
    handover: Handover
    views: Views = Views.CURRENT
    start: Start | Queues = Start.SUBSCRIBED
    choice: Choice = Choice.ANYBODY
    deaths: int = 0
    stops: int = 0
    hangs: int = 0
    joiners: int = 0
    algorithm: Algorithm = production

    def __str__(self) -> str:
        size = f"{self.queues}x{self.members} {self.handover.value}"
        return ", ".join([size, self.choice.value, *filter(None, self.situation())])

    def situation(self) -> tuple[str, str, str]:
        """Describe the members' views, the start, and the disturbances."""
        told = "" if self.algorithm is production else f", {self.algorithm.__name__.replace('_', ' ')}"
        start = self.start.value if isinstance(self.start, Start) else "given"
        befalls = ", ".join(f"{count} {what}" for what, count in self.befalling().items() if count)
        return f"{self.views.value} views{told}", start, befalls

    @property
    def at_once(self) -> bool:
        """Whether nobody ever sees a queue between two."""
        return self.choice is not Choice.LATE and self.handover is not Handover.TAKE

    def befalling(self) -> dict[str, int]:
        """Describe the disturbances of members, and how often each may happen."""
        return {"deaths": self.deaths, "stops": self.stops, "hangs": self.hangs, "joiners": self.joiners}


class Label(NamedTuple):
    """Who did what. ``interrupts``: a queue was taken from its consumer. ``gap``: and no member is left on it."""

    what: str
    who: str
    queue: str = ""
    interrupts: bool = False
    gap: bool = False

    @property
    def befalls(self) -> bool:
        """Tell whether it is a disturbance, not an action of members or RabbitMQ."""
        return self.what in {"die", "start", "stop", "hang"}


class Group:
    """The states of one case, and the steps between them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.members = tuple(NAMES[: case.members])
        self.names = tuple(f"q{number}" for number in range(1, case.queues + 1))
        self._broker = Broker(case.handover, case.choice)
        self._ids: dict[Queues, int] = {}
        self.queues: list[Queues] = []
        """The broker's states, by number."""
        self._decided: dict[tuple[int, int, tuple[int, ...]], tuple[tuple[int, Step[str]], ...]] = {}
        self._late: dict[tuple[int, int, tuple[int, ...]], tuple[tuple[int, Step[str]], ...]] = {}
        self._applied: dict[tuple[int, int, Step[str], int], list[tuple[int, Label]]] = {}
        self._moved: dict[int, list[tuple[int, Label]]] = {}

    # -- where it starts -----------------------------------------------------------------------------------------------

    def starts(self) -> Iterator[State]:
        """Return every state of the case's kind. All members have seen it."""
        case = self.case
        first = self.members[: case.members - case.joiners]
        status = tuple(Status.UP if member in first else Status.DOWN for member in self.members)
        left = (case.deaths, case.stops, case.hangs)
        if not isinstance(case.start, Start):
            given: Iterable[Queues] = [case.start]
        else:
            given = itertools.product([*self._queue_starts(first, case.start)], repeat=case.queues)
        for queues in given:
            number = self._number(queues)
            views = () if case.views is Views.CURRENT else tuple(-1 if how else number for how in status)
            yield number, views, status, left

    def _queue_starts(self, members: tuple[str, ...], start: Start) -> Iterator[QueueView]:
        if start is Start.EMPTY:
            yield QueueView()
            return
        actives: list[str | None] = [members[0]] if start is Start.ALL_ON_ONE else [*members]
        if start is Start.ANY:
            actives.append(None)
            if self.case.at_once:  # a queue without a consumer has no waiting member
                yield QueueView()
                actives.pop()
        for active in actives:
            others = [member for member in members if member != active]
            for count in range(0 if start is Start.ANY else len(others), len(others) + 1):
                line = itertools.combinations if self.case.choice is Choice.ANYBODY else itertools.permutations
                for waiting in line(others, count):
                    yield QueueView(active, 0, tuple(Waiting(member) for member in waiting))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[State, Label]]:
        """Yield every possible next step."""
        now, views, status, left = state
        if not self.case.at_once:
            for after, label in self._moves(now):
                yield (after, views, status, left), label
        for number in range(len(self.members)):
            how = status[number]
            if how == Status.UP:
                yield from self._member_steps(state, number)
                yield from self._befalls(state, number)
            elif how == Status.STOPPING:
                yield from self._closings(state, number)
            elif how == Status.DOWN:
                started = _replaced(status, number, Status.UP)
                yield (now, _replaced(views, number, now), started, left), Label("start", self.members[number])

    def _member_steps(self, state: State, number: int) -> Iterator[tuple[State, Label]]:
        now, views, status, left = state
        view = views[number] if views else now
        if view != now:
            yield from self._looks(state, number)
        decided = self._decisions(view, number, status)
        if left[2] < self.case.hangs:
            decided += self._late_decisions(view, number, status)
        for queue, step in decided:
            for after, label in self._results(now, queue, step, number):
                if not views or self.case.views is Views.BLIND:
                    yield (after, views, status, left), label
                elif view == now:  # it happens as predicted
                    yield (after, _replaced(views, number, after), status, left), label
                else:
                    for foreseen, _ in self._results(view, queue, step, number):
                        yield (after, _replaced(views, number, foreseen), status, left), label

    def _looks(self, state: State, number: int) -> Iterator[tuple[State, Label]]:
        now, views, status, left = state
        who = self.members[number]
        if self.case.views is not Views.TORN:
            yield (now, _replaced(views, number, now), status, left), Label("look", who)
            return
        seen, there = self.queues[views[number]], self.queues[now]
        for queue, name in enumerate(self.names):
            if seen[queue] != there[queue]:
                torn = self._number(_replaced(seen, queue, there[queue]))
                yield (now, _replaced(views, number, torn), status, left), Label("look", who, name)

    def _befalls(self, state: State, number: int) -> Iterator[tuple[State, Label]]:
        now, views, status, (deaths, stops, hangs) = state
        who = self.members[number]
        if deaths:
            down, unseen = _replaced(status, number, Status.DOWN), _replaced(views, number, -1)
            for after in self._gone(now, number):
                yield (after, unseen, down, (deaths - 1, stops, hangs)), Label("die", who)
        if stops:
            stopping, unseen = _replaced(status, number, Status.STOPPING), _replaced(views, number, -1)
            yield (now, unseen, stopping, (deaths, stops - 1, hangs)), Label("stop", who)
        if hangs:
            hung, unseen = _replaced(status, number, Status.HUNG), _replaced(views, number, -1)
            yield (now, unseen, hung, (deaths, stops, hangs - 1)), Label("hang", who)

    def _closings(self, state: State, number: int) -> Iterator[tuple[State, Label]]:
        """Return the closings of a stopping member: it closes its channels one by one, and is then gone."""
        now, views, status, left = state
        on = [queue for queue, view in enumerate(self.queues[now]) if is_on(view, self.members[number])]
        for queue in on:
            for after, label in self._results(now, queue, Step(CLOSE, self.names[queue]), number):
                yield (after, views, status, left), label._replace(what="close", interrupts=False)
        if not on:
            gone = _replaced(status, number, Status.GONE)
            yield (now, views, gone, left), Label("close", self.members[number])

    # -- remembered ----------------------------------------------------------------------------------------------------

    def _number(self, queues: Queues) -> int:
        number = self._ids.get(queues)
        if number is None:
            number = self._ids[queues] = len(self.queues)
            self.queues.append(queues)
        return number

    def _decisions(self, view: int, number: int, status: tuple[int, ...]) -> tuple[tuple[int, Step[str]], ...]:
        key = view, number, status
        known = self._decided.get(key)
        if known is None:
            known = self._decided[key] = self._asked(view, number, self._started(status), ())
        return known

    def _started(self, status: tuple[int, ...]) -> list[str]:
        there = {Status.UP, Status.HUNG}
        return [member for member, how in zip(self.members, status, strict=True) if how in there]

    def _late_decisions(self, view: int, number: int, status: tuple[int, ...]) -> tuple[tuple[int, Step[str]], ...]:
        """Return the extra steps about queues that may have had no consumer for too long, in the eyes of each
        member.
        """
        key = view, number, status
        known = self._late.get(key)
        if known is None:
            nobody = [name for name, queue in zip(self.names, self.queues[view], strict=True) if queue == QueueView()]
            at_once = self._decisions(view, number, status)
            late = self._asked(view, number, self._started(status), nobody) if nobody else at_once
            known = self._late[key] = tuple(one for one in late if one not in at_once)
        return known

    def _asked(
        self, view: int, number: int, started: Sequence[str], overdue: Collection[str]
    ) -> tuple[tuple[int, Step[str]], ...]:
        queues = dict(zip(self.names, self.queues[view], strict=True))
        steps = self.case.algorithm(self.members[number], started, queues, self.case.handover, overdue)
        return tuple((self.names.index(step.queue), step) for step in steps)

    def _results(self, now: int, queue: int, step: Step[str], number: int) -> list[tuple[int, Label]]:
        """Return the broker's states after a member's step; several if RabbitMQ acts immediately and has a choice."""
        key = now, queue, step, number
        known = self._applied.get(key)
        if known is None:
            before, me = self.queues[now][queue], self.members[number]
            first = self._broker.apply(before, step, me)
            label = Label(step.verb.value, me, self.names[queue])
            gap = before != QueueView() and first.queue == QueueView()
            known = list[tuple[int, Label]]()
            for after in self._settled(first):
                interrupts = first.interrupts or after.interrupts
                changed = self._number(_replaced(self.queues[now], queue, after.queue))
                known.append((changed, label._replace(interrupts=interrupts, gap=gap)))
            self._applied[key] = known
        return known

    def _settled(self, first: After) -> list[After]:
        return (self.case.at_once and self._broker.own_steps(first.queue)) or [first._replace(interrupts=False)]

    def _moves(self, now: int) -> list[tuple[int, Label]]:
        """Return RabbitMQ's own steps."""
        known = self._moved.get(now)
        if known is None:
            known = self._moved[now] = [
                (
                    self._number(_replaced(self.queues[now], queue, after.queue)),
                    Label("activate", "RabbitMQ", name, after.interrupts),
                )
                for queue, name in enumerate(self.names)
                for after in self._broker.own_steps(self.queues[now][queue])
            ]
        return known

    def _gone(self, now: int, number: int) -> list[int]:
        """Return the broker's possible states after a member has died: all of its channels are closed."""
        reached = {now}
        for queue, name in enumerate(self.names):
            if is_on(self.queues[now][queue], self.members[number]):
                reached = {
                    after for one in reached for after, _ in self._results(one, queue, Step(CLOSE, name), number)
                }
        return sorted(reached)


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :]) if values else values
