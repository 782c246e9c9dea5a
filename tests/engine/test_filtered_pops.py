"""Parked pops with filters: found by what they wait for, and served as if each message was matched against each of
them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parked_scene import Filter, Pop, Scene
from engine.patience import patiently
from popgate.domain.filter_index import FilterIndex
from popgate.domain.filters import FilterValue, HeaderFilter, header_filter
from popgate.domain.topics import Policy
from popgate.engine.lease.pop_request import Leased, PopRequest, Waiter
from popgate.engine.lease.selection import COMPARED_AT_ONCE_MAX
from popgate.engine.settle.orders import Verb
from popgate.engine.subscription.parked_pops import ASKED_AT_ONCE_MAX, ENDED_AT_ONCE_MAX, ParkedPops
from popgate.ports.journal import EventKind
from support.engines import World, bodies, eventually

HEADER_NAMES = ["kind", "region"]
HEADER_VALUES: tuple[FilterValue, ...] = ("a", "b", 1, 1.0, True, None)
MATCH_NOTHING = 1_000

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


async def test_messages_that_come_together_reach_pops_with_different_filters() -> None:
    scene = Scene()
    for color in ("red", "blue", "red", "green"):
        scene.park(Pop({"color": [color]}, most=2, by_admin=False), first=False)
    await scene.served()
    scene.arrive([(None, {"color": color}) for color in ("blue", "red", "red", "red", "blue", "yellow")])
    await scene.served()
    assert [number for number, _ in scene.model.parked] == [3]


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
        candidates = chain.from_iterable(index.candidates(index.facts(headers), headers))
        found = [one for one in candidates if one(headers)]
        assert sorted(found, key=filters.index) == [one for one in filters if one(headers)]
    for one in filters:
        index.remove(one)
    assert len(index) == 0
    assert vars(index) == vars(FilterIndex()), "what was removed leaves nothing behind"


# ---------------------------------------------------------------- how much work it is


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[HeaderFilter]:
    """Return the filters that were matched against a message."""
    filters: list[HeaderFilter] = []
    original: Callable[[HeaderFilter, Mapping[str, object]], bool] = HeaderFilter.__call__

    def ask(one: HeaderFilter, headers: Mapping[str, object]) -> bool:
        filters.append(one)
        return original(one, headers)

    monkeypatch.setattr(HeaderFilter, "__call__", ask)
    return filters


async def park(world: World, filters: Sequence[Filter]) -> "list[asyncio.Task[object]]":
    """Park pops with these filters, which wait for 30 seconds."""
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


OVERLAPPING: list[Filter] = [{"a": [1, -n], "b": [1, -n], "c": [0, -n]} for n in range(2, MATCH_NOTHING)]
"""Filters most of which must be compared with a message whose headers are all 1, wherever they are in the index."""


async def test_filters_that_overlap_are_asked_a_few_at_a_time(world: World, asked: list[HeaderFilter]) -> None:
    await world.create("t")
    waiting = await park(world, OVERLAPPING)
    asked.clear()
    popping = asyncio.ensure_future(world.pop("t", wait=30.0))
    await eventually(lambda: world.served("t").parked_pops == len(OVERLAPPING) + 1)
    headers = dict.fromkeys("abc", 1)
    await world.publish("t", "for any", headers=headers)
    assert bodies(await popping) == ["for any"]
    assert len(asked) <= 2 * ASKED_AT_ONCE_MAX, "what a pop without a filter has taken, no filter is asked for"
    (last,) = await park(world, [{"a": [1], "b": [1], "c": [1]}])
    await world.publish("t", "for the last one", headers=headers)
    async with asyncio.timeout(10):
        assert bodies(await cast("asyncio.Future[list[Leased]]", last)) == ["for the last one"]
    assert not any(pop.done() for pop in waiting)
    await world.let_pass(30.0)
    assert await asyncio.gather(*waiting) == [[]] * len(OVERLAPPING)
    (other,) = await park(world, [{"z": [1]}])
    asked.clear()
    await world.publish("t", "for those that have left", headers=headers)
    await world.settle_down()
    assert asked == [], "the filters of pops that have left are forgotten"
    await world.let_pass(30.0)
    assert await other == []


async def test_new_filters_are_compared_with_few_of_many_ready_messages_at_a_time(
    world: World, asked: list[HeaderFilter]
) -> None:
    await world.create("t")
    count = 3 * COMPARED_AT_ONCE_MAX
    other = asyncio.ensure_future(world.pop("t", wait=30.0, only={"kind": ["none"]}))
    for _ in range(count // 100):
        await world.publish("t", *["m"] * 100, headers={"kind": "blue"})
    await world.publish("t", *["last"] * 10, headers={"kind": "red"})
    await eventually(lambda: world.served("t").serving.ready.count(count + 10) == count + 10)
    asked.clear()
    waiting = [asyncio.ensure_future(world.pop("t", wait=30.0, only={"kind": ["red"]})) for _ in range(10)]
    while not all(pop.done() for pop in waiting):
        before = len(asked)
        await asyncio.sleep(0)
        assert len(asked) - before < 2 * COMPARED_AT_ONCE_MAX
    assert [bodies(await pop) for pop in waiting] == [["last"]] * 10
    assert len(asked) < 2 * count, "pops with equal filters share the comparisons"
    assert bodies(await world.pop("t", only={"kind": ["blue"]})) == ["m"], "without a wait, it is found, too"
    await world.let_pass(30.0)
    assert await other == []


async def test_messages_that_no_filter_can_tell_apart_are_looked_up_once(
    world: World, asked: list[HeaderFilter]
) -> None:
    """While a group is full its messages accumulate: the work must not be the product of ready messages and waiting
    pops.
    """
    await world.create("t", policy=Policy(max_in_flight=1))
    await world.publish("t", "first")
    leased = await world.pop("t")
    waiting = await park(
        world, [{"target": [number, "any"], "kind": [number, "order"]} for number in range(MATCH_NOTHING)]
    )
    await world.publish("t", *(f"m{number}" for number in range(200)), headers={"target": "any", "kind": "order"})
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


async def test_a_filter_finds_its_message_behind_those_that_come_before_the_resize_returns(world: World) -> None:
    """They fill the new prefetch, so the pop needs another resize."""
    await world.publish("t", *(f"m{number}" for number in range(40)), headers={"kind": "blue"})
    await world.publish("t", "wanted", headers={"kind": "red"})
    resizing = world.faults.stop("channel.resize", after=True)
    popping = asyncio.ensure_future(world.pop("t", wait=20.0, only={"kind": ["red"]}))
    await resizing.reached()
    await world.settle_down()
    resizing.open()
    assert bodies(await patiently(world, popping)) == ["wanted"]


async def test_pops_that_have_waited_long_enough_together_end_a_few_at_a_time() -> None:
    parked = ParkedPops()
    waiters = [Waiter(PopRequest(), short=False, changes=0) for _ in range(2 * ENDED_AT_ONCE_MAX + 1)]
    for waiter in waiters:
        parked.add(waiter, first=False)
        waiter.due(0.0)
    ended: list[int] = []
    for _ in range(4):
        await asyncio.sleep(0)
        ended.append(sum(waiter.future.done() for waiter in waiters))
    assert ended == [ENDED_AT_ONCE_MAX, 2 * ENDED_AT_ONCE_MAX, 2 * ENDED_AT_ONCE_MAX + 1, 2 * ENDED_AT_ONCE_MAX + 1]
