"""The engine is stopped, or its claim is overtaken, during its work."""

import asyncio
from pathlib import Path

import pytest

from engine.patience import (
    LEASE_SECONDS,
    dead_once,
    drained,
    host_of,
    left,
    overtake,
    parked,
    patient_pop,
    patiently,
)
from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.domain.lease import SettleAction
from popgate.domain.topics import Policy
from popgate.engine.queue.buffered import MessageState
from popgate.engine.queue.record_upkeep import review
from popgate.engine.settle.orders import Verb
from popgate.ports.leases import SettleEntry
from popgate.runtime.clocks import ManualClock
from support.engines import (
    PATIENCE_SECONDS,
    World,
    bodies,
    open_world,
    start_world,
    stop_world,
)

# ---------------------------------------------------------------- the engine is stopped


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("broker.consume", False),
        ("broker.consume", True),
        ("leases.claim", False),
        ("leases.load", True),
        ("leases.grant", False),
        ("leases.grant", True),
        ("channel.resize", False),
        ("channel.resize", True),
    ],
)
async def test_an_engine_stops_in_time_while_a_call_hangs_and_loses_nothing(
    folder: Path, call: str, after: bool
) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    names = [f"m{number}" for number in range(8)]  # more than the first window, so that it is made wider
    await world.publish("t", *names)
    if call in ("leases.claim", "leases.load"):
        await overtake(world)
    gate = world.faults.stop(call, after=after)
    popping = asyncio.ensure_future(world.pop("t", count=16, wait=20, invisibility=LEASE_SECONDS))
    await patiently(world, asyncio.ensure_future(gate.reached()))
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await stop_world(world)
    assert asyncio.all_tasks() <= {asyncio.current_task(), popping}, "nothing of the engine's goes on"
    gate.open()
    (outcome,) = await asyncio.gather(popping, return_exceptions=True)
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        got: list[str] = []
        if isinstance(outcome, list):
            got = bodies(outcome)
            assert await risen.settle(Verb.ACK, "t", outcome) == ["acked"] * len(outcome)
        else:
            assert isinstance(outcome, RetryLater)
        assert sorted(got + await drained(risen)) == names


async def test_parked_pops_are_answered_when_the_engine_stops_and_new_ones_are_refused(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    popping = [await parked(world, attempt=attempt) for attempt in (None, None, "once")]
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await world.engine.drain()
        assert [await one for one in popping] == [[], [], []]
    with pytest.raises(RetryLater):
        await world.pop("t")
    assert await world.publish("t", "a") == ["published"]
    await stop_world(world)
    await world.engine.stop()
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        assert await drained(risen) == ["a"]


async def test_a_channel_that_opens_when_the_engine_has_been_drained_is_closed_again(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("broker.consume", after=True)
    popping = asyncio.ensure_future(world.pop("t", wait=20))
    await gate.reached()
    await world.engine.drain()
    assert await popping == []
    gate.open()
    await world.settle_down()
    (depth,) = await world.broker.depth([world.queue("t")])
    assert (depth.ready, depth.consumers) == (1, 0)


async def test_a_queue_that_is_lost_while_it_waits_to_be_opened_anew_is_not_consumed_behind_that(world: World) -> None:
    """RabbitMQ would keep it for this proxy, and no other could get it."""
    await world.publish("t", "a")
    host = host_of(world)
    assert bodies(await world.pop("t")) == ["a"]
    gate = world.faults.stop("channel.close")
    host.deliver_again()
    opening = asyncio.ensure_future(host.open())
    await gate.reached()
    await world.settle_down()
    host.lose()
    gate.open()
    await opening
    await world.settle_down()
    assert world.faults.calls.count("broker.consume") == 1
    assert host.listener is None


async def test_a_dead_lettering_that_hangs_when_the_engine_stops_is_finished_after_the_restart(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t", policy=Policy(max_deliveries=1))
    await world.publish("t", "a")
    await patient_pop(world, invisibility=5)
    gate = world.faults.stop("broker.publish", after=True)
    await world.let_pass(5)
    await gate.reached()
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await stop_world(world)
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        await dead_once(risen, "a")
        assert await left(risen) == 0


# ---------------------------------------------------------------- the claim is overtaken


async def test_an_engine_whose_claim_is_overtaken_amid_deliveries_loses_nothing(world: World) -> None:
    names = [f"m{number:02}" for number in range(30)]
    await world.publish("t", *names[:10])
    acked: list[str] = []
    for number in range(10, 30, 2):
        leased = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
        popping = [asyncio.ensure_future(world.pop("t", count=4, wait=2, invisibility=LEASE_SECONDS)) for _ in "12"]
        for _ in range(number // 2):
            await asyncio.sleep(0)
        await overtake(world)
        await world.publish("t", *names[number : number + 2])
        for one in popping:
            leased += await patiently(world, one)
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * len(leased)
        acked += bodies(leased)
    acked += await drained(world)
    assert sorted(acked) == names, "each exactly once"
    assert host_of(world).epoch > 10


async def test_who_meets_a_lease_of_a_later_claim_lets_go_of_the_queue(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=600)
    host = host_of(world)
    (loaded,) = await world.leases.load(host.broker_queue)
    later = await world.leases.claim(host.broker_queue)
    host.learn(loaded.copy_id, loaded.record._replace(epoch=later), loaded.remaining_seconds)
    assert (host.epoch, host.channel) == (0, None)
    await world.let_pass(1)
    assert await world.pop("t") == []
    assert host.epoch == later + 1, "who is alone claims it again"
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_grant_that_is_overtaken_half_way_takes_nothing_with_it(world: World, after: bool) -> None:
    await world.publish("t", "a", "b", "c")
    gate = world.faults.stop("leases.grant", after=after)
    first = asyncio.ensure_future(world.pop("t", wait=20, invisibility=LEASE_SECONDS))
    await gate.reached()
    await overtake(world)
    second = asyncio.ensure_future(world.pop("t", wait=20, invisibility=LEASE_SECONDS))
    leased = await patiently(world, second)  # it was fenced, and the queue is claimed and consumed again
    epoch = host_of(world).epoch
    gate.open()
    leased += await patiently(world, first)
    assert host_of(world).epoch == epoch, "an answer to the old claim does not end the new one"
    assert sorted(bodies(leased)) == ["a", "b"]
    assert bodies(await patient_pop(world, count=3, invisibility=1)) == ["c"]
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * 2
    await world.let_pass(1)
    assert await drained(world) == ["c"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_dead_lettering_that_is_overtaken_half_way_makes_one_dead_letter(world: World, after: bool) -> None:
    await world.publish("t", "a", "b", "c")
    (a,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    (b,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    assert await world.settle(Verb.RELEASE, "t", [b], seconds=60) == ["released"]
    gate = world.faults.stop("broker.publish", after=after)
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", [a]))
    await gate.reached()
    await overtake(world)
    assert bodies(await patient_pop(world, count=5, wait=10, invisibility=1)) == ["c"]
    gate.open()
    assert await rejecting == ["rejected"]
    await dead_once(world, "a")
    await world.let_pass(60)
    assert await drained(world) == ["b", "c"]
    dead = [one for one in world.broker.published if one.queue == world.served("t").layout.dead]
    assert len(dead) == 1, "RabbitMQ would keep both"


async def test_a_repeat_whose_queue_changes_hands_meanwhile_is_told_to_come_again(world: World) -> None:
    """Its leases last, and their new owner has them: an answer without them would say that they have ended."""
    await world.publish("t", "a")
    leased = await world.pop("t", wait=2.0, attempt="once", invisibility=LEASE_SECONDS)
    gate = world.faults.stop("broker.consume")
    await world.broker.lose(world.queue("t"))
    repeat = asyncio.ensure_future(world.pop("t", attempt="once", invisibility=LEASE_SECONDS))
    await patiently(world, asyncio.ensure_future(gate.reached()))  # it has to fetch the message once more
    world.served("t").lose(host_of(world))
    gate.open()
    await world.served("t").take(host_of(world))  # by this proxy again, without its old knowledge
    with pytest.raises(StateUnavailable):
        await patiently(world, repeat)
    assert await world.pop("t", wait=2.0, attempt="once", invisibility=LEASE_SECONDS) == leased


@pytest.mark.parametrize(("action", "next_one"), [(SettleAction.ACK, "b"), (SettleAction.RELEASE, "a")])
async def test_what_another_proxy_settled_and_did_not_tell_is_found_in_the_store(
    world: World, action: SettleAction, next_one: str
) -> None:
    await world.publish("t", "a", "b", ordering_key="k")
    await patient_pop(world, invisibility=LEASE_SECONDS)
    (held,) = [held for held in host_of(world).messages() if held.state is MessageState.LEASED]
    await world.leases.wrapped.settle([SettleEntry(world.queue("t"), held.copy_id, held.lease_id, action)])
    assert await patient_pop(world, wait=0) == []
    await review(world.context, host_of(world))
    assert bodies(await patient_pop(world)) == [next_one]
