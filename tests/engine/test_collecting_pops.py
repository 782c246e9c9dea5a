"""Pops that wait a moment for more messages, in virtual time.

Messages that are published one after the other become ready one after the other, as RabbitMQ delivers them: the first
one alone, the others some milliseconds later.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.patience import parked, patient_pop
from engine.pull_clients import into_pull_mode, registered
from popgate.domain.names import InstanceId, Subscription
from popgate.domain.topics import Policy
from popgate.engine.lease.pop_request import Leased, Presence
from popgate.engine.settle.orders import Verb
from popgate.engine.subscription.collecting import COLLECT_SECONDS, LONE_MAX, QUIET_SECONDS
from popgate.engine.subscription.serving import Serving
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, open_world, start_world, stop_world

TICK = 1 / 1024
"""About a millisecond, of which sums are exact: five are shorter than `COLLECT_SECONDS`, and six longer."""
COLORS = ("red", "blue")
KIB = 1024

Popping = asyncio.Task[list[Leased]]


def serving(world: World) -> Serving:
    return world.served("t").serving


async def arrive(world: World, *messages: str, color: str = "red", key: str | None = None) -> None:
    """Make messages arrive: they are published together, delivered, and offered to the parked pops."""
    await world.publish("t", *messages, headers={"color": color}, ordering_key=key)
    await world.settle_down()


async def ten_arrive(world: World) -> None:
    """Make ten messages arrive as RabbitMQ delivers them."""
    await arrive(world, "0")
    await world.let_pass(3 * TICK)
    await arrive(world, *"123456789")


async def popping(
    world: World, *, count: int = 4, wait: float = 20.0, color: str | None = None, presence: Presence | None = None
) -> Popping:
    """Start a pop that has proceeded as far as it can without more time."""
    only = None if color is None else {"color": [color]}
    pop = asyncio.ensure_future(world.pop("t", count=count, wait=wait, only=only, presence=presence))
    await world.settle_down()
    return pop


async def got(pop: Popping) -> str:
    """Return the pop's answer, which must already exist."""
    assert pop.done()
    return "".join(bodies(await pop))


# ---------------------------------------------------------------- how long a pop waits, and what for


async def test_a_parked_pop_of_four_gets_four_of_ten_messages(world: World) -> None:
    pop = await parked(world, count=4)
    await ten_arrive(world)
    assert await got(pop) == "0123", "at once, when there were four"


async def test_a_pop_that_finds_the_first_of_ten_messages_gets_four(world: World) -> None:
    await patient_pop(world)  # the queue is open
    await arrive(world, "0")
    pop = await popping(world)
    assert not pop.done()
    await arrive(world, *"123456789")
    assert await got(pop) == "0123"


async def test_a_single_message_is_answered_when_the_time_is_over(world: World) -> None:
    pop = await parked(world, count=4)
    await arrive(world, "0")
    await world.let_pass(5 * TICK)
    assert not pop.done()
    await world.let_pass(TICK)
    assert await got(pop) == "0"


async def test_single_messages_in_succession_are_answered_at_once(world: World) -> None:
    for number in range(LONE_MAX + 3):
        pop = await parked(world, count=4)
        await arrive(world, str(number))
        if number < LONE_MAX:
            await world.let_pass(6 * TICK)
        assert await got(pop) == str(number)
        await world.let_pass(QUIET_SECONDS)


async def test_messages_that_go_on_arriving_do_not_make_a_pop_wait_longer(world: World) -> None:
    pop = await parked(world, count=32)
    for number in range(6):
        await arrive(world, str(number))
        assert not pop.done()
        await world.let_pass(TICK)
    assert await got(pop) == "012345"


async def test_a_pop_of_one_message_does_not_wait(world: World) -> None:
    pop = await parked(world, count=1)
    await arrive(world, "0")
    assert await got(pop) == "0"


async def test_a_pop_that_does_not_want_to_wait_does_not(world: World) -> None:
    await patient_pop(world)
    await arrive(world, "0")
    assert await got(await popping(world, wait=0.0)) == "0"


async def test_a_pop_whose_wait_is_nearly_over_is_answered_at_once(world: World) -> None:
    pop = await parked(world, count=4, wait=1.0)
    await world.let_pass(1.0 - COLLECT_SECONDS / 2)
    await arrive(world, "0")
    assert await got(pop) == "0"
    await arrive(world, "1")
    assert await got(await popping(world, wait=COLLECT_SECONDS / 2)) == "1"


async def test_a_pop_that_collects_gets_what_a_narrow_window_keeps_back(folder: Path) -> None:
    async with open_world(folder, clock=ManualClock(), buffer_bytes_max=16 * KIB * KIB) as world:
        await world.create("t")
        await arrive(world, *"01234567")
        pop = await popping(world, count=8)
        assert world.broker.channels[world.queue("t")].prefetches[0] == 1
        assert await got(pop) == "01234567"


async def test_nothing_waits_while_memory_for_bodies_is_short(folder: Path) -> None:
    async with open_world(folder, clock=ManualClock(), buffer_bytes_max=512 * KIB) as world:
        await world.create("t")
        pop = await parked(world, count=4)
        await arrive(world, "0" * 300 * KIB)
        assert len(await got(pop)) == 300 * KIB


# ---------------------------------------------------------------- several pops


async def test_each_of_several_parked_pops_gets_as_many_as_it_may_take(world: World) -> None:
    pops = [await parked(world, count=4) for _ in range(4)]
    await ten_arrive(world)
    assert [await got(pop) for pop in pops[:2]] == ["0123", "4567"]
    assert not pops[2].done()
    await world.let_pass(6 * TICK)
    assert await got(pops[2]) == "89"
    assert not pops[3].done()
    await world.let_pass(20.0)
    assert await got(pops[3]) == ""


async def test_a_pop_of_few_behind_one_of_many_gets_what_is_left(world: World) -> None:
    many, few = await parked(world, count=32), await parked(world, count=1)
    await arrive(world, "0")
    await world.let_pass(6 * TICK)
    assert (await got(many), few.done()) == ("0", False)
    await arrive(world, "1")
    assert await got(few) == "1"


async def test_a_pop_that_does_not_want_to_wait_is_answered_beside_one_that_collects(world: World) -> None:
    pop = await parked(world, count=4)
    await arrive(world, "0")
    short = await popping(world, wait=0.0)
    await world.let_pass(6 * TICK)
    assert (await got(pop), await got(short)) == ("0", "")


async def test_the_next_pop_gets_the_messages_in_the_same_time_if_the_client_leaves(world: World) -> None:
    presence = Presence()
    first, second = await popping(world, presence=presence), await parked(world, count=4)
    await arrive(world, "0")
    await world.let_pass(4 * TICK)
    presence.leave()
    await world.settle_down()
    assert (await got(first), second.done()) == ("", False)
    await world.let_pass(2 * TICK)
    assert await got(second) == "0"


async def test_a_pop_that_is_cancelled_while_it_collects_leaves_its_messages_to_the_next_one(world: World) -> None:
    first = await parked(world, count=4)
    await arrive(world, "0")
    first.cancel()
    await asyncio.wait([first])
    second = await popping(world)
    await world.let_pass(6 * TICK)
    assert await got(second) == "0"


@pytest.mark.parametrize("first", ["request", "message"])
async def test_another_proxy_that_has_pops_is_told_when_messages_were_collected_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    other, told = InstanceId("other"), list[InstanceId]()

    def tell(to: InstanceId, _: Subscription) -> None:
        told.append(to)

    monkeypatch.setattr(world.context.router, "notify_available", tell)
    await patient_pop(world)  # the queue is open
    if first == "request":
        assert not world.served("t").wanted_by(other, 30.0, 0)
    await arrive(world, "0")
    if first == "message":
        assert not world.served("t").wanted_by(other, 30.0, 0)
    await world.let_pass(5 * TICK)
    assert told == []
    await world.let_pass(TICK)
    assert told == [other]
    assert world.served("t").wanted_by(other, 30.0, 0), "it is there since then"


# ---------------------------------------------------------------- pops that do not take any message


async def test_a_pop_with_a_filter_does_not_collect(world: World) -> None:
    blue = await popping(world, color="blue")
    plain = await parked(world, count=4)
    await arrive(world, "r")
    await arrive(world, "b", color="blue")
    assert await got(blue) == "b"
    await world.let_pass(6 * TICK)
    assert await got(plain) == "r"


async def test_a_pop_with_a_filter_gets_what_came_while_one_before_it_collected(world: World) -> None:
    plain = await parked(world, count=3)
    blue = await popping(world, color="blue")
    await arrive(world, "r")
    await arrive(world, "q")
    await arrive(world, "a", "b", color="blue")
    assert (await got(plain), await got(blue)) == ("rqa", "b")


async def test_a_pop_with_a_filter_looks_again_at_what_a_client_that_left_was_to_get(world: World) -> None:
    presence = Presence()
    plain = await popping(world, presence=presence)
    blue = await popping(world, color="blue")
    await arrive(world, "b", color="blue")
    assert not blue.done()
    presence.leave()
    await world.let_pass(6 * TICK)
    assert (await got(plain), await got(blue)) == ("", "b")


async def test_a_pull_does_not_collect(world: World) -> None:
    await into_pull_mode(world)
    (client,) = await registered(world, "a")
    pull = asyncio.ensure_future(client.asks_for(4, wait=20.0))
    await world.settle_down()
    await world.publish("p", "0")
    await world.settle_down()
    assert await got(pull) == "0"


# ---------------------------------------------------------------- what ends it


async def test_a_pop_that_collects_gets_nothing_of_a_group_that_is_paused_until_it_is_resumed(world: World) -> None:
    pop = await parked(world, count=4)
    await arrive(world, "0")
    await world.engine.changes.put_group("t", "default", Policy(paused=True))
    await world.let_pass(1.0)
    assert not pop.done()
    await world.engine.changes.put_group("t", "default", Policy())
    await world.let_pass(1.0)
    await world.let_pass(1.0)
    assert await got(pop) == "0"


async def test_a_pop_that_collects_is_answered_when_its_proxy_stops_and_its_messages_stay(folder: Path) -> None:
    world = await start_world(folder, clock=ManualClock())
    await world.create("t")
    pop = await parked(world, count=4)
    await arrive(world, "0")
    await stop_world(world)
    assert await got(pop) == ""
    async with open_world(folder, clock=world.clock) as again:
        assert bodies(await again.pop("t")) == ["0"]


async def test_a_pop_that_may_get_no_more_because_of_max_in_flight_does_not_wait_for_more(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_in_flight=2))
    pop = await parked(world, count=4)
    await arrive(world, "0")
    assert not pop.done()
    await arrive(world, "1")
    assert await got(pop) == "01"


async def test_a_queue_that_is_lost_takes_its_messages_from_a_pop_that_collects_until_it_is_back(world: World) -> None:
    pop = await parked(world, count=4)
    await arrive(world, "0")
    await world.broker.lose(world.queue("t"))
    await world.let_pass(6 * TICK)
    assert not pop.done()
    await world.let_pass(1.0)
    await world.let_pass(6 * TICK)
    assert await got(pop) == "0"


# ---------------------------------------------------------------- at random


class Crowd:
    """Clients that pop, leave, and acknowledge messages, in any order; and the promises to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.published: dict[str | None, list[str]] = {}
        self.answered: list[str] = []
        """The bodies that were handed out, in the order of the answers."""
        self._presences: dict[Popping, Presence] = {}
        self._plain: set[Popping] = set()
        self._unsettled: list[Leased] = []
        self._since: float | None = None
        """The time at which a pop began to wait although it can be answered."""

    @property
    def count(self) -> int:
        return sum(map(len, self.published.values()))

    async def publish(self, count: int, key: str | None, color: str) -> None:
        new = [f"m{self.count + number}" for number in range(count)]
        self.published.setdefault(key, []).extend(new)
        await arrive(self.world, *new, color=color, key=key)

    async def pop(self, count: int, color: str | None, wait: float) -> None:
        presence = Presence()
        pop = await popping(self.world, count=count, wait=wait, color=color, presence=presence)
        self._presences[pop] = presence

    async def leave(self, pick: int) -> None:
        present = [*self._presences.values()]
        if present:
            present[pick % len(present)].leave()

    async def ack(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        await self.world.settle(Verb.ACK, "t", unsettled)

    async def let_pass(self, ticks: int) -> None:
        await self.world.let_pass(ticks * TICK)

    async def look(self) -> None:
        """Collect answers; a pop that can be answered must not have waited too long."""
        await self.world.settle_down()
        done = [pop for pop in self._presences if pop.done()]
        for pop in done:
            del self._presences[pop]
            leased = await pop
            self._unsettled += leased
            self.answered += bodies(leased)
        now = self.world.clock.monotonic()
        first = next((one for one in serving(self.world).parked if one.request.selection.filter is None), None)
        if first is None or not first.request.selection.has(serving(self.world).ready):
            self._since = None
            return
        assert serving(self.world).ready.count(first.request.max_messages) < first.request.max_messages
        self._since = now if self._since is None or done else self._since
        assert now - self._since < COLLECT_SECONDS

    async def drain(self) -> None:
        """Let all clients leave, and another one take the remaining messages."""
        for presence in self._presences.values():
            presence.leave()
        await self.look()
        assert not self._presences
        for _ in range(self.count):
            await self.ack()
            self._unsettled = await patient_pop(self.world, count=256)
            self.answered += bodies(self._unsettled)
            if not self._unsettled:
                break


PUBLISH = st.tuples(
    st.just("publish"),
    st.sampled_from([1, 1, 2, 10]),
    st.sampled_from([None, None, "a", "b"]),
    st.sampled_from(COLORS),
)
POP = st.tuples(
    st.just("pop"),
    st.sampled_from([1, 4, 32, 32]),
    st.sampled_from([None, None, None, *COLORS]),
    st.sampled_from([0.0, 7 * TICK, 1.0, 20.0]),
)
STEPS = st.lists(
    st.one_of(
        PUBLISH,
        PUBLISH,
        POP,
        st.tuples(st.just("let_pass"), st.sampled_from([1, 2, 4, 4, 7])),
        st.tuples(st.just("let_pass"), st.sampled_from([1, 2, 4, 4, 7])),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("ack")),
    ),
    min_size=20,
    max_size=60,
)


async def _run(folder: Path, steps: Sequence[tuple[str, ...]]) -> None:
    async with open_world(folder, clock=ManualClock()) as world:
        await world.create("t")
        crowd = Crowd(world)
        for verb, *values in steps:
            await getattr(crowd, verb)(*values)
            await crowd.look()
        await crowd.drain()
        assert sorted(crowd.answered) == sorted(f"m{number}" for number in range(crowd.count)), (
            "all, and each of them once"
        )
        for key in ("a", "b"):
            wanted = crowd.published.get(key, [])
            assert [body for body in crowd.answered if body in wanted] == wanted, "in order"


@given(STEPS)
def test_nothing_is_lost_or_handed_out_twice_and_no_pop_waits_for_too_long(steps: Sequence[tuple[str, ...]]) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="popgate-test-") as name:
        asyncio.run(_run(Path(name), steps))
