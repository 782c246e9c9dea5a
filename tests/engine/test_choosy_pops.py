"""Pops that take only some messages: with a filter, by an admin, for a lease group; and full groups."""

import asyncio
import gc
from pathlib import Path

import pytest

from popgate.domain.errors import TooManyInFlight
from popgate.domain.names import StreamName
from popgate.domain.topics import Policy
from popgate.engine.lease.pop_request import Leased
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, eventually, open_world
from support.faulty import FaultyChannel

TTL = 10.0
RED, BLUE = {"color": ["red"]}, {"color": ["blue"]}


async def publish(world: World, color: str, *messages: str, key: str | None = None, ttl: float | None = None) -> None:
    await world.publish("t", *messages, headers={"color": color}, ordering_key=key, ttl=ttl)


async def parked(world: World, *pops: "asyncio.Task[list[Leased]]", count: int) -> None:
    """Return when that many pops are parked, with none of `pops` done."""
    await eventually(lambda: world.served("t").parked_pops == count)
    assert not any(pop.done() for pop in pops)


def living() -> int:
    """Return how many messages the process still knows."""
    gc.collect()
    return sum(isinstance(one, BufferedMessage) for one in gc.get_objects())


# ---------------------------------------------------------------- filters


async def test_an_expired_message_hides_nobody_from_a_pop_whose_filter_does_not_want_it(world: World) -> None:
    await publish(world, "blue", "a", key="k", ttl=TTL)
    await publish(world, "red", "b", key="k")
    assert await world.pop("t", only=RED) == []
    await world.let_pass(TTL)
    assert bodies(await world.pop("t", only=RED)) == ["b"]
    assert world.journal.count(EventKind.DISCARDED) == 1


async def test_a_parked_pop_gets_who_stood_behind_a_message_that_its_filter_does_not_want(world: World) -> None:
    await publish(world, "blue", "a", key="k")
    await publish(world, "red", "b", key="k")
    waiting = asyncio.ensure_future(world.pop("t", only=RED, wait=30.0))
    await parked(world, waiting, count=1)
    leased = await world.pop("t", only=BLUE)
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    assert bodies(await waiting) == ["b"]


async def test_pops_with_filters_alone_do_not_remember_what_has_gone(world: World) -> None:
    before = living()
    for start in range(0, 4_000, 200):
        await publish(world, "red", *(f"m{number}" for number in range(start, start + 200)))
        while leased := await world.pop("t", count=200, only=RED):
            await world.settle(Verb.ACK, "t", leased)
    await world.settle_down()
    assert living() - before < 1_000


async def test_what_no_filter_wants_is_bounded_in_memory_however_small_it_is(folder: Path) -> None:
    limit = 512 * 1024
    async with open_world(folder, clock=ManualClock(), buffer_bytes_max=limit) as world:
        await world.create("t")
        for start in range(0, 4_000, 200):
            await publish(world, "blue", *(f"m{number}" for number in range(start, start + 200)))
        waiting = asyncio.ensure_future(world.pop("t", only=RED, wait=30.0))
        await parked(world, waiting, count=1)
        for _ in range(20):
            await world.settle_down()
        assert 100 < sum(len(host.messages()) for host in world.served("t").hosts) <= 2 * limit // 1024
        await world.let_pass(30.0)
        assert await waiting == []


async def test_a_short_pop_ends_at_once_where_what_the_broker_counted_came_before_the_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come and match no pop by the time the answer comes; nothing else notifies a pop that parks after
    it.
    """
    await world.create("t")
    assert await world.pop("t") == []
    asked: list[FaultyChannel] = []

    async def backlog(channel: FaultyChannel) -> int:
        asked.append(channel)
        if len(asked) > 1:
            return 0
        arrivals = world.served("t").serving.arrivals
        await publish(world, "blue", "a")
        await eventually(lambda: world.served("t").serving.arrivals > arrivals)
        return 1

    monkeypatch.setattr(FaultyChannel, "backlog", backlog)
    assert await world.pop("t", only=RED) == []
    assert len(asked) == 2


# ---------------------------------------------------------------- where the group is full


async def full(world: World) -> None:
    """A group that hands out nothing until a client settles, although it has messages."""
    await world.engine.changes.put_group("t", "default", Policy(max_in_flight=1))
    await publish(world, "red", "out", "more")
    assert bodies(await world.pop("t", count=2)) == ["out"]


async def test_a_purge_passes_parked_pops_where_the_group_is_full(world: World) -> None:
    await full(world)
    waiting = asyncio.ensure_future(world.pop("t", wait=30.0))
    await parked(world, waiting, count=1)
    assert await world.engine.purge("t", "default") == (1, True)
    await world.let_pass(30.0)


async def test_a_purge_that_could_not_get_all_says_so(world: World) -> None:
    await publish(world, "red", "a")
    gate = world.faults.stop("leases.grant")
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    purging = asyncio.ensure_future(world.engine.purge("t", "default"))
    await world.settle_down()
    await world.let_pass(2.0)
    assert not (await purging).complete, "somebody else was being given it, and it may come back"
    gate.open()
    await popping


async def test_a_pop_with_a_filter_gets_what_came_while_the_group_was_full(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_in_flight=1))
    plain = [asyncio.ensure_future(world.pop("t", wait=30.0)) for _ in range(2)]
    await parked(world, *plain, count=2)
    blue = asyncio.ensure_future(world.pop("t", wait=30.0, only=BLUE))
    await parked(world, *plain, blue, count=3)
    await publish(world, "red", "first", "second")
    leased = await plain[0]
    await publish(world, "blue", "blue")
    await world.settle_down()
    for others in (plain[1], blue):
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
        leased = await others
    assert bodies(leased) == ["blue"]


async def test_a_lease_group_gets_who_stands_behind_its_own_members_beside_a_parked_pop(world: World) -> None:
    for start in range(0, 600, 200):
        await publish(world, "red", *(f"m{number}" for number in range(start, start + 200)), key="k")
    gate = world.faults.stop("leases.grant")
    forming = asyncio.ensure_future(
        world.engine.lease_groups.put(
            "t", "default", StreamName("s"), 1, max_messages=600, slices=1, invisibility_seconds=60.0
        )
    )
    await gate.reached()
    plain = asyncio.ensure_future(world.pop("t", wait=30.0))
    await parked(world, plain, count=1)
    gate.open()
    assert (await forming).message_count == 600
    await world.let_pass(30.0)
    assert await plain == []


async def test_what_is_discarded_is_not_in_flight(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_in_flight=1))
    for number in range(5):
        await world.publish("t", f"old {number}", ordering_key="k", ttl=TTL)
    await world.publish("t", "new", ordering_key="k")
    await world.let_pass(TTL)
    (leased,) = await world.pop("t")
    assert bodies([leased]) == ["new"]
    assert world.journal.count(EventKind.DISCARDED) == 5
    with pytest.raises(TooManyInFlight):
        await world.pop("t")


async def test_a_message_that_is_being_discarded_can_still_be_acked(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    leased = await world.pop("t", invisibility=TTL)
    await world.let_pass(TTL)
    gate = world.faults.stop("leases.settle.discard")
    popping = asyncio.ensure_future(world.pop("t", wait=5.0))
    await gate.reached()
    (held,) = [held for host in world.served("t").hosts for held in host.messages()]
    assert held.state is MessageState.DISCARDING
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    gate.open()
    await world.let_pass(5.0)
    assert await popping == []
    assert world.journal.count(EventKind.DISCARDED) == 0
