"""A scrape gets the latest reading of the broker, and never waits for it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from popgate.domain.errors import BrokerUnavailable
from popgate.engine.subscription import backlogs
from popgate.engine.subscription.gauges import SubscriptionGauges
from popgate.runtime.clocks import ManualClock
from support.engines import World, eventually, open_world

TOPIC = "t"
PAUSE_SECONDS = 0.001


def gauges(world: World) -> SubscriptionGauges:
    (found,) = world.engine.gauges()
    return found


@pytest.fixture
async def reading(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A world whose backlogs are read all the time."""
    monkeypatch.setattr(backlogs, "PAUSE_SECONDS_MAX", PAUSE_SECONDS)
    task = asyncio.create_task(world.engine.backlogs.run(PAUSE_SECONDS))
    yield world
    task.cancel()
    await asyncio.wait([task])


async def until_ready(world: World, count: int) -> None:
    await eventually(lambda: gauges(world).ready == count)


async def test_a_backlog_is_known_although_no_client_has_asked(reading: World) -> None:
    await reading.publish(TOPIC, "a", "b", "c")
    await until_ready(reading, 3)
    assert gauges(reading).ready_buffered == 0
    await reading.let_pass(5)
    assert gauges(reading).oldest_age_seconds == pytest.approx(5.0)


async def test_while_the_broker_hangs_the_last_reading_stays_and_says_how_old_it_is(reading: World) -> None:
    await reading.publish(TOPIC, "a", "b")
    await until_ready(reading, 2)
    gate = reading.faults.stop("broker.depth")
    await gate.reached()
    await reading.publish(TOPIC, "c")
    await reading.let_pass(100)
    assert gauges(reading).ready == 2
    assert reading.engine.backlogs.age_seconds >= 100
    gate.open()
    await until_ready(reading, 3)
    await eventually(lambda: reading.engine.backlogs.age_seconds < 100)


async def test_an_unavailable_broker_does_not_end_the_reading(reading: World) -> None:
    await reading.publish(TOPIC, "a")
    await until_ready(reading, 1)
    reading.faults.fail("broker.depth", BrokerUnavailable("away"), times=3)
    await reading.publish(TOPIC, "b")
    await until_ready(reading, 2)


async def test_a_message_in_memory_is_as_old_as_its_publish_and_stays_so_when_it_returns(reading: World) -> None:
    await reading.publish(TOPIC, "a", "b")
    await reading.let_pass(7)
    (leased,) = await reading.pop(TOPIC)
    served = reading.engine.topics.subscription(TOPIC, "default")
    for host in served.hosts:
        host.return_buffer()
    await until_ready(reading, 1)
    assert gauges(reading).oldest_age_seconds == pytest.approx(7.0)
    assert gauges(reading).in_flight == 1
    assert leased.delivery_count == 1


async def test_a_leased_message_does_not_wait(reading: World) -> None:
    await reading.publish(TOPIC, "a")
    await reading.let_pass(7)
    (leased,) = await reading.pop(TOPIC)
    await eventually(lambda: gauges(reading).oldest_age_seconds == 0.0)
    assert gauges(reading).in_flight == 1
    await reading.publish(TOPIC, "b")
    await reading.let_pass(3)
    await eventually(lambda: gauges(reading).oldest_age_seconds == pytest.approx(3.0))
    assert leased.delivery_count == 1


async def test_a_group_that_is_gone_has_no_backlog(reading: World) -> None:
    await reading.publish(TOPIC, "a")
    await until_ready(reading, 1)
    (name,) = reading.engine.topics.served
    await reading.engine.deletions.delete_topic(TOPIC)
    await eventually(lambda: reading.engine.backlogs.of(name) is None)


async def test_a_restart_does_not_make_waiting_messages_younger(folder: Path) -> None:
    clock = ManualClock()
    async with open_world(folder / "data", clock=clock) as world:
        await world.create(TOPIC)
        await world.publish(TOPIC, "a")
        await world.let_pass(30)
    async with open_world(folder / "data", clock=clock) as world:
        task = asyncio.create_task(world.engine.backlogs.run(PAUSE_SECONDS))
        await until_ready(world, 1)
        assert gauges(world).oldest_age_seconds == pytest.approx(30.0)
        task.cancel()
        await asyncio.wait([task])
