"""A queue is deleted while the engine uses it, or is only reported as gone."""

import asyncio

import pytest

from engine.patience import (
    LEASE_SECONDS,
    come_back,
    delete_queues,
    drained,
    parked,
    patient_pop,
    patiently,
)
from popgate.domain.errors import QueueGone
from popgate.engine.queue.channel_opener import OPEN_RETRY_SECONDS_MAX
from popgate.engine.settle.orders import Verb
from support.engines import (
    World,
    bodies,
)

# ---------------------------------------------------------------- a queue is deleted


async def test_a_deleted_queue_is_missed_until_its_group_is_declared_again(world: World) -> None:
    await world.publish("t", "a", "b")
    old = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    popping = await parked(world)
    await delete_queues(world)
    began = world.clock.monotonic()
    with pytest.raises(QueueGone):
        await patiently(world, popping)
    assert world.clock.monotonic() - began <= 2 * OPEN_RETRY_SECONDS_MAX, "what is gone is not waited for"
    for wait in (0, 20):
        with pytest.raises(QueueGone):
            await world.pop("t", wait=wait)
        await world.let_pass(OPEN_RETRY_SECONDS_MAX)
    assert await world.publish("t", "lost") == ["failed"]

    await world.engine.changes.put_group("t", "default", None)
    await world.publish("t", "d", "e")
    (d,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    assert set(await world.settle(Verb.ACK, "t", old[:1])) <= {"acked", "expired"}
    assert "rejected" not in await world.settle(Verb.REJECT, "t", old[1:])
    assert bodies(await patient_pop(world, count=5, invisibility=1)) == ["e"]
    assert await world.settle(Verb.ACK, "t", [d]) == ["acked"]
    await world.let_pass(1)
    assert await drained(world) == ["e"], "old receipts touch nothing new"
    assert await world.dead_letters("t") == []


async def test_what_one_group_of_a_topic_can_not_get_is_published_to_none(world: World) -> None:
    """The broker confirms it because the other group's queue takes it."""
    await world.publish("t", "a")
    await world.engine.changes.put_group("t", "other", None)
    await patient_pop(world)
    await delete_queues(world)
    assert await world.publish("t", "lost") == ["failed"]
    assert (await world.engine.status("t", "other")).ready == 0
    await world.engine.changes.put_group("t", "default", None)
    assert await world.publish("t", "b") == ["published"]
    assert (await world.engine.status("t", "other")).ready == 1
    assert await drained(world) == ["b"]


async def test_a_group_that_is_created_again_takes_messages_though_its_queue_was_missing(world: World) -> None:
    await world.publish("t", "a")
    await patient_pop(world)
    await delete_queues(world)
    assert await world.publish("t", "lost") == ["failed"]
    await world.engine.deletions.delete_group("t", "default")
    await world.engine.changes.put_group("t", "default", None)
    assert await world.publish("t", "b") == ["published"]
    assert await drained(world) == ["b"]


async def test_receipts_of_a_deleted_queue_do_not_distort_what_is_said_of_the_new_one(world: World) -> None:
    await world.publish("t", "a", "b")
    old = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    await delete_queues(world)
    await world.engine.changes.put_group("t", "default", None)
    await world.settle(Verb.ACK, "t", old[:1])
    await world.settle(Verb.EXTEND, "t", old[1:], seconds=60)
    await world.let_pass(60)
    await world.let_pass(60)
    await world.publish("t", "c")  # stays with the broker, because no pop asks
    status = await world.engine.status("t", "default")
    assert (status.ready, status.in_flight, status.delayed) == (1, 0, 0)


async def test_a_grant_that_meets_the_deletion_of_its_queue_harms_nothing_new(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("leases.grant", after=True)
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    await delete_queues(world)
    await world.engine.changes.put_group("t", "default", None)
    await world.publish("t", "b")
    gate.open()
    popped = await popping
    assert bodies(popped) == ["a"], "it was here, and its lease is written"
    await world.settle(Verb.ACK, "t", popped)
    assert await drained(world) == ["b"]


async def test_a_queue_that_is_only_said_to_be_gone_keeps_its_leases_and_settlements(world: World) -> None:
    await world.publish("t", "a", "b", "c")
    a, b = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    world.broker.channels[world.queue("t")].drops_acks = True
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
    await world.broker.lose(world.queue("t"), queue_gone=True)
    with pytest.raises(QueueGone):
        await world.pop("t")
    await come_back(world)  # a queue that has elected another leader may be reported so, too
    assert bodies(await patient_pop(world, count=5, invisibility=1)) == ["c"]
    assert await world.settle(Verb.ACK, "t", [b]) == ["acked"]
    await world.let_pass(1)
    assert await drained(world) == ["c"]
