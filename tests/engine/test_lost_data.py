"""The state store loses its data while queues are served: owners write back their records, and nothing comes twice."""

import asyncio
from pathlib import Path

import pytest

from engine.patience import dead_once, host_of, overtake, patient_pop
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.topics import Policy
from popgate.engine.queue.buffered import NO_LEASE
from popgate.engine.settle.orders import Verb
from popgate.ports.leases import LoadedRecord
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, open_world, start_world


async def test_nothing_is_leased_before_the_records_that_the_store_has_lost_are_written_back(world: World) -> None:
    await world.publish("t", "a", "b")
    (a,) = await patient_pop(world)
    host = host_of(world)
    host.claim.data_lost()
    asked = world.faults.calls.count("leases.grant")
    with pytest.raises(StateUnavailable, match="the store has lost its data"):
        await world.pop("t")
    assert world.faults.calls.count("leases.grant") == asked, "its answer would be that of an empty store"
    await host.take()
    assert bodies(await patient_pop(world)) == ["b"]
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]


async def test_a_queue_that_is_taken_while_the_store_loses_its_data_is_taken_once_more(world: World) -> None:
    await world.publish("t", "a")
    await overtake(world)  # so that it has to be claimed again
    claimed = world.faults.calls.count("leases.claim")
    gate = world.faults.stop("leases.load")
    popping = asyncio.ensure_future(patient_pop(world, wait=10))
    await gate.reached()
    host_of(world).claim.data_lost()
    gate.open()
    assert bodies(await popping) == ["a"]
    assert world.faults.calls.count("leases.claim") == claimed + 2, "the first epoch was that of the lost data"


async def test_records_that_are_written_back_while_the_store_loses_them_again_are_written_once_more(
    world: World,
) -> None:
    await world.publish("t", "a", "b")
    (a,) = await patient_pop(world)
    host = host_of(world)
    host.claim.data_lost()
    gate = world.faults.stop("leases.restore", after=True)
    taking = asyncio.ensure_future(host.take())
    await gate.reached()
    host.claim.data_lost()
    gate.open()
    with pytest.raises(StateUnavailable):
        await taking
    await host.take()
    assert world.faults.calls.count("leases.restore") == 2
    assert bodies(await patient_pop(world)) == ["b"]
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]


async def test_an_ack_that_the_broker_has_not_seen_stands_after_a_loss_of_data_and_a_crash(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    await world.publish("t", "a", "b")
    (a,) = await patient_pop(world, invisibility=600)
    world.faults.stop("broker.consume")
    await world.broker.lose(world.queue("t"))
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
    await world.leases.wrapped.drop_queue(world.queue("t"))
    host_of(world).claim.data_lost()
    await host_of(world).take()
    await crash(world, folder / "data", folder / "copy")
    async with open_world(folder / "copy", clock=clock) as risen:
        assert bodies(await patient_pop(risen, count=2)) == ["b"]


async def test_a_message_whose_deliveries_only_the_store_has_counted_is_dead_lettered_by_that_count(
    world: World,
) -> None:
    """Like one that was at the broker when its owner wrote back the lost records."""
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=2))
    await world.publish("t", "a")
    copy_id = world.broker.published[0].message.copy_id
    counted = LeaseRecord(RecordState.RELEASED, NO_LEASE, 0.0, 2, 0.0, 0.0, 0, 0.0)
    await world.leases.restore(world.queue("t"), [LoadedRecord(copy_id, counted, 0.0)], above=0)
    assert await patient_pop(world) == []
    await dead_once(world, "a")
