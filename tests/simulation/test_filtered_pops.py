"""Parked pops with filters: found by what they wait for, and served as if each of them was asked for each message."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.filter_index import FilterIndex
from popgate.domain.filters import FilterValue, HeaderFilter, header_filter
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, GroupName, Layout, Subscription, TopicName
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.held import Held, HeldState
from popgate.engine.lines import Lines
from popgate.engine.moves import Mover
from popgate.engine.parked import ENDED_AT_ONCE_MAX, Parked
from popgate.engine.popping import PopRequest, Waiter
from popgate.engine.queue_host import QueueHost
from popgate.engine.room import EngineOptions, Room, furnish
from popgate.engine.serving import Serving
from popgate.engine.settling import Verb
from popgate.ports.journal import EventKind
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock
from support.engines import ListJournal, World, bodies, eventually

NAME = Subscription(TopicName("t"), GroupName("g"))
LAYOUT = Layout(subscription=NAME, queues=(BrokerQueue("popgate:t:g:0"),), dead=BrokerQueue("popgate:t:g:dead"))
HEADER_NAMES = ["kind", "region"]
HEADER_VALUES: tuple[FilterValue, ...] = ("a", "b", 1, 1.0, True, None)
MATCH_NOTHING = 1_000

Filter = Mapping[str, Sequence[FilterValue]]

# ---------------------------------------------------------------- the model


class Pop(NamedTuple):
    """A parked pop. ``wants`` None: any message."""

    wants: Filter | None
    most: int
    by_admin: bool


def passes(wants: Filter | None, headers: Mapping[str, object]) -> bool:
    def is_one(value: object, allowed: Sequence[FilterValue]) -> bool:
        return any(type(value) is bool and value is one if type(one) is bool else value == one for one in allowed)

    return wants is None or all(
        is_one(headers.get(name), [one for one in values if (type(one) is bool) == (type(headers.get(name)) is bool)])
        for name, values in wants.items()
    )


class Model:
    """What pops get, said plainly: each parked pop in turn takes the oldest that it wants of all that is ready."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, str | None, Mapping[str, object]]] = []
        """(number, ordering key, headers), by number."""
        self.out: dict[int, tuple[int, str | None, Mapping[str, object]]] = {}
        self.parked: list[tuple[int, Pop]] = []
        self.in_flight_max: int | None = None

    def serve(self) -> dict[int, list[int]]:
        """What each pop gets, by its number."""
        got: dict[int, list[int]] = {}
        for number, pop in self.parked:
            if taken := self._take(pop):
                got[number] = taken
        self.parked = [(number, pop) for number, pop in self.parked if number not in got]
        return got

    def _take(self, pop: Pop) -> list[int]:
        most = pop.most
        if self.in_flight_max is not None and not pop.by_admin:
            most = min(most, self.in_flight_max - len(self.out))
        taken: list[int] = []
        passed_over: set[str | None] = set()
        for one in list(self.ready):
            number, key, headers = one
            if len(taken) >= most:
                break
            others = [other for other, its_key, _ in self.out.values() if its_key == key and other not in taken]
            if key is not None and (key in passed_over or min(others, default=number) < number):
                continue  # it stands behind one that another pop has, or that this one does not want
            if passes(pop.wants, headers):
                self.ready.remove(one)
                self.out[number] = one
                taken.append(number)
            else:
                passed_over.add(key)
        return taken


# ---------------------------------------------------------------- what is held against it


class Scene:
    """The serving of one subscription with messages, and no broker or store beneath it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.room = empty_room(self.clock)
        hosts: list[QueueHost] = []
        mover = Mover(self.room, NAME, LAYOUT, lambda: 0)
        self.serving = Serving(
            self.room,
            NAME,
            LAYOUT,
            hosts,
            Policy(),
            mover,
            came=lambda: None,
            met=lambda _: None,
            host_lost=lambda _: None,
            has_demand=lambda: True,
        )
        hosts.append(QueueHost(self.room, LAYOUT, LAYOUT.queue_ids()[0], self.serving))
        (self.host,) = hosts
        self.serving.enter(GroupSpec(subscription=NAME, policy=Policy(), mode=ConsumeMode.POP))
        self.lines = Lines()
        self.held: dict[int, Held] = {}
        self.pops: dict[int, Waiter] = {}
        self.numbers = count()
        self.model = Model()

    def arrive(self, many: Sequence[tuple[str | None, Mapping[str, object]]]) -> None:
        came: list[Held] = []
        for key, headers in many:
            number = next(self.numbers)
            copy_id = CopyId(f"{number:032x}")
            held = self.held[number] = self.host.held[copy_id] = Held(self.host, copy_id)
            held.message = Message(copy_id, f"m{number}", b"", headers, key, 0.0)
            held.rank = number + 1
            if key is not None:
                self.lines.join(held, key)
            came.append(held)
            self.model.ready.append((number, key, headers))
        self.serving.became_ready(came)
        self.serving.changed()

    def park(self, pop: Pop, *, first: bool) -> None:
        number = len(self.pops)
        request = PopRequest(
            max_messages=pop.most,
            matches=None if pop.wants is None else header_filter(pop.wants),
            by_admin=pop.by_admin,
        )
        waiter = self.pops[number] = Waiter(request, short=False, changes=self.serving.changes)
        self.serving.park(waiter, first=first)
        self.model.parked.insert(0 if first else len(self.model.parked), (number, pop))

    def leave(self, place: int) -> None:
        """The wait of a parked pop is over."""
        if self.model.parked:
            number, _ = self.model.parked.pop(place % len(self.model.parked))
            self.pops[number].give_up()
            self.serving.leave(self.pops.pop(number))
            self.pops[number] = Waiter(PopRequest(), short=False, changes=0)  # keeps the numbers

    def end(self, place: int, *, comes_again: bool) -> None:
        """A lease ends: the message is settled, or comes again in its place."""
        if not self.model.out:
            return
        number = sorted(self.model.out)[place % len(self.model.out)]
        one, held = self.model.out.pop(number), self.held[number]
        if comes_again:
            held.state = HeldState.READY
            self.model.ready = sorted([*self.model.ready, one])
            self.serving.became_ready([held])
        else:
            held.state = HeldState.DROPPED
            following = self.lines.leave(held)
            if following is not None and following.state is HeldState.READY:
                self.serving.became_ready([following])
        self.serving.fewer_out()

    def limit(self, most: int | None) -> None:
        self.model.in_flight_max = most
        self.serving.change_policy(Policy(max_in_flight=most))
        self.serving.look_again()

    async def served(self) -> None:
        """Serve both, once no pop waits for more messages, and compare."""
        for _ in range(3):
            await asyncio.sleep(0)
        self.clock.advance(1.0)
        self.room.deadlines.tick()
        got = {
            number: [int(held.copy_id, 16) for held in waiter.future.result()]
            for number, waiter in self.pops.items()
            if waiter.future.done() and waiter.future.result()
        }
        for number in got:
            self.pops[number] = Waiter(PopRequest(), short=False, changes=0)
        expected = self.model.serve()
        assert got == expected, (got, expected)
        assert len(self.serving.parked) == len(self.model.parked)


def empty_room(clock: ManualClock) -> Room:
    """Ports that are not asked for anything."""
    database, records = Database(Path("nowhere"), clock), LatestRecords()
    return furnish(
        EngineOptions(instance="i.", secret=b"a secret of the tests alone", auto_create=True),
        broker=SqliteBroker(database),
        leases=SqliteLeaseStore(database, records),
        dedup=SqliteDedupStore(database),
        lease_groups=SqliteLeaseGroups(database, records),
        assignments=SqliteAssignments(database),
        catalog=SqliteCatalog(database),
        journal=ListJournal(),
        clock=clock,
        background=Background(lambda error: None),
    )


# ---------------------------------------------------------------- at random

NAMES = st.sampled_from(HEADER_NAMES)
VALUES: st.SearchStrategy[FilterValue] = st.sampled_from(HEADER_VALUES)
ODD_VALUES: st.SearchStrategy[object] = st.sampled_from([b"a", ["a"], {"a": 1}])
FILTERS = st.dictionaries(NAMES, st.lists(VALUES, min_size=1, max_size=3), min_size=1)
HEADERS = st.dictionaries(NAMES, st.one_of(VALUES, VALUES, ODD_VALUES))
KEYS = st.sampled_from([None, None, "k", "l"])
POPS = st.builds(Pop, st.one_of(*[FILTERS] * 5, st.none()), st.integers(1, 3), st.sampled_from([False] * 9 + [True]))
NUMBERS = st.integers(0, 100)
STEPS = st.one_of(
    st.tuples(st.just("park"), POPS, st.booleans()),
    st.tuples(st.just("park"), POPS, st.just(False)),
    st.tuples(st.just("arrive"), st.lists(st.tuples(KEYS, HEADERS), min_size=1, max_size=4)),
    st.tuples(st.just("arrive"), st.lists(st.tuples(KEYS, HEADERS), min_size=1, max_size=4)),
    st.tuples(st.just("end"), NUMBERS, st.booleans()),
    st.tuples(st.just("leave"), NUMBERS),
    st.tuples(st.just("end"), NUMBERS, st.booleans()),
    st.tuples(st.just("limit"), st.sampled_from([None, 1, 2, 3])),
)


def do(scene: Scene, step: tuple[object, ...]) -> None:
    match step:
        case ("park", Pop() as pop, bool(first)):
            scene.park(pop._replace(wants=None) if pop.by_admin else pop, first=first)
        case ("arrive", many):
            scene.arrive(cast("list[tuple[str | None, dict[str, object]]]", many))
        case ("end", int(place), bool(comes_again)):
            scene.end(place, comes_again=comes_again)
        case ("leave", int(place)):
            scene.leave(place)
        case ("limit", most):
            assert most is None or isinstance(most, int)
            scene.limit(most)
        case _:
            pass


@given(st.lists(STEPS, min_size=20, max_size=60), st.sampled_from([1, 1, 2, 4]))
@settings(max_examples=100, deadline=None)
def test_every_parked_pop_gets_what_it_would_get_if_each_was_asked_for_each_message(
    steps: list[tuple[object, ...]], at_once: int
) -> None:
    async def play() -> None:
        scene = Scene()
        for number, step in enumerate(steps):
            do(scene, step)
            if number % at_once == 0:
                await scene.served()
        await scene.served()

    asyncio.run(play())


@given(
    st.lists(FILTERS.map(header_filter), unique=True),
    st.lists(HEADERS, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_the_index_finds_exactly_the_filters_that_a_message_passes(
    filters: list[HeaderFilter], many: list[dict[str, object]]
) -> None:
    index = FilterIndex()
    for one in filters:
        index.add(one)
    for headers in many:
        found = list(index.passed_by(index.facts(headers), headers))
        assert sorted(found, key=filters.index) == [one for one in filters if one(headers)]
    for one in filters:
        index.remove(one)
    assert len(index) == 0
    assert vars(index) == vars(FilterIndex()), "what was removed leaves nothing behind"


# ---------------------------------------------------------------- how much work it is


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[HeaderFilter]:
    """The filters that were asked whether they want a message."""
    filters: list[HeaderFilter] = []
    original: Callable[[HeaderFilter, Mapping[str, object]], bool] = HeaderFilter.__call__

    def ask(one: HeaderFilter, headers: Mapping[str, object]) -> bool:
        filters.append(one)
        return original(one, headers)

    monkeypatch.setattr(HeaderFilter, "__call__", ask)
    return filters


async def park(world: World, filters: Sequence[Filter]) -> "list[asyncio.Task[object]]":
    """Pops with these filters, which wait for 30 seconds."""
    before = world.served("t").parked_pops
    pops = [asyncio.ensure_future(world.pop("t", wait=30.0, only=one)) for one in filters]
    await eventually(lambda: world.served("t").parked_pops == before + len(filters))
    await world.settle_down()
    return [*pops]


DIFFERENT: list[Filter] = [{"kind": ["order"], "id": [number]} for number in range(MATCH_NOTHING)]
ALIKE: list[Filter] = [{"kind": ["order"], "region": ["eu"]}] * MATCH_NOTHING
ABSENT: list[Filter] = [{"kind": [None], "id": [number, None]} for number in range(MATCH_NOTHING)]


@pytest.mark.parametrize(("filters", "most"), [(DIFFERENT, 10), (ALIKE, 10), (ABSENT, 10)], ids=["ids", "one", "none"])
async def test_a_message_asks_only_the_filters_that_it_may_concern(
    world: World, asked: list[HeaderFilter], filters: list[Filter], most: int
) -> None:
    await world.create("t")
    waiting = await park(world, filters)
    asked.clear()
    for number in range(10):
        popping = asyncio.ensure_future(world.pop("t", wait=30.0))
        await eventually(lambda: world.served("t").parked_pops == MATCH_NOTHING + 1)
        await world.publish("t", f"m{number}", headers={"kind": "order", "region": "us", "id": "none of these"})
        assert bodies(await popping) == [f"m{number}"]
    assert len(asked) <= most
    assert not any(pop.done() for pop in waiting)
    await world.let_pass(30.0)
    assert await asyncio.gather(*waiting) == [[]] * MATCH_NOTHING


async def test_messages_that_no_filter_can_tell_apart_are_looked_up_once(
    world: World, asked: list[HeaderFilter]
) -> None:
    """While a group is full its messages pile up: what is ready must not be multiplied by who waits."""
    await world.create("t", policy=Policy(max_in_flight=1))
    await world.publish("t", "first")
    leased = await world.pop("t")
    waiting = await park(world, [{"target": [number, "any"]} for number in range(MATCH_NOTHING)])
    await world.publish("t", *(f"m{number}" for number in range(200)), headers={"target": "any"})
    await world.settle_down()
    asked.clear()
    await world.settle_handles(Verb.ACK, "t", "default", [leased[0].receipt_handle])
    assert bodies(await waiting[0]) == ["m0"]  # type: ignore[arg-type]  # what a pop got
    assert len(asked) <= MATCH_NOTHING + 2 * 200
    await world.let_pass(30.0)
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_pops_that_left_leave_nothing_behind(world: World) -> None:
    await world.create("t")
    waiting = await park(world, [*DIFFERENT[:50], *ALIKE[:50], *ABSENT[:50]])
    for pop in waiting[::2]:
        pop.cancel()
    await world.let_pass(30.0)
    await asyncio.gather(*waiting, return_exceptions=True)
    parked = world.served("t").serving.parked
    assert len(parked) == 0
    assert not parked.has_filters()


async def test_what_has_expired_when_it_comes_is_discarded_though_no_parked_filter_wants_it(world: World) -> None:
    await world.publish("t", "first", headers={"kind": "blue"}, ordering_key="k")
    await world.publish("t", "old", headers={"kind": "blue"}, ordering_key="k", ttl=10.0)
    leased = await world.pop("t", invisibility=60.0)
    waiting = await park(world, [{"kind": ["red"]}])
    await world.let_pass(10.0)
    assert world.journal.count(EventKind.DISCARDED) == 0, "it stands behind the other one of its key"
    await world.settle(Verb.ACK, "t", leased)
    await eventually(lambda: world.journal.count(EventKind.DISCARDED) == 1)
    await world.let_pass(30.0)
    assert await asyncio.gather(*waiting) == [[]]


async def test_pops_that_have_waited_long_enough_together_end_a_few_at_a_time() -> None:
    parked = Parked()
    waiters = [Waiter(PopRequest(), short=False, changes=0) for _ in range(2 * ENDED_AT_ONCE_MAX + 1)]
    for waiter in waiters:
        parked.add(waiter, first=False)
        waiter.due(0.0)
    ended: list[int] = []
    for _ in range(4):
        await asyncio.sleep(0)
        ended.append(sum(waiter.future.done() for waiter in waiters))
    assert ended == [ENDED_AT_ONCE_MAX, 2 * ENDED_AT_ONCE_MAX, 2 * ENDED_AT_ONCE_MAX + 1, 2 * ENDED_AT_ONCE_MAX + 1]
