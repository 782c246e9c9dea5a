"""A scrape gets the latest reading of the broker, and never waits for it."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from popgate.domain.errors import BrokerUnavailable
from popgate.domain.topics import Policy
from popgate.engine.queue.waiting_since import GUESSED_SECONDS
from popgate.engine.subscription import backlogs
from popgate.engine.subscription.backlogs import Backlogs
from popgate.engine.subscription.counting import queue_counts
from popgate.engine.subscription.gauges import SubscriptionGauges
from popgate.runtime.clocks import ManualClock
from support.engines import World, eventually, open_world
from support.faulty import FaultyBroker

TOPIC = "t"
PAUSE_SECONDS = 0.001
IDLE_SECONDS = 20.0


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


# ---------------------------------------------------------------- what it costs


def bytecodes(call: Callable[[], object]) -> int:
    """Return how many bytecodes a call executes."""
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        executed += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return executed


async def cost_of_a_reading(world: World, count: int) -> int:
    """Return the bytecodes of a reading and a scrape with ``count`` messages, half of them leased."""
    topic = f"with-{count}"
    await world.create(topic, queues=1)
    await world.publish(topic, *(str(number) for number in range(count)))
    left = count // 2
    while left:
        left -= len(await world.pop(topic, count=left))
    served = world.engine.topics.subscription(topic, "default")
    (host,) = served.hosts
    await eventually(lambda: len(host.messages()) == count)

    def read() -> None:
        queue_counts(served.group)
        in_flight = {str(one.topic): one.in_flight for one in world.engine.gauges()}
        assert in_flight[topic] == count // 2

    read()
    cost = bytecodes(read)
    await world.engine.deletions.delete_topic(topic)
    return cost


async def test_a_reading_and_a_scrape_cost_the_same_however_much_is_in_memory(world: World) -> None:
    few, many = [await cost_of_a_reading(world, count) for count in (10, 300)]
    assert few == many


# ---------------------------------------------------------------- a broker that does not tell the age


async def no_rounds(*_: object) -> None:
    """Take the place of ``Backlogs.run``."""


class Silent:
    """A broker that does not tell since when its messages wait, as RabbitMQ."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def unknown(*_: object) -> None:
            pass

        monkeypatch.setattr(FaultyBroker, "oldest_at", unknown)
        monkeypatch.setattr(backlogs, "PAUSE_SECONDS_MAX", PAUSE_SECONDS)
        self._folder = folder
        self._clock = ManualClock()

    @asynccontextmanager
    async def proxy(self) -> AsyncGenerator[World]:
        """Run a proxy, after a restart if it is not the first one."""
        async with open_world(self._folder / "data", clock=self._clock, idle_return_seconds=IDLE_SECONDS) as world:
            task = asyncio.create_task(world.engine.backlogs.run(PAUSE_SECONDS))
            yield world
            task.cancel()
            await asyncio.wait([task])

    async def fill(self, *, policy: Policy | None = None) -> None:
        """Publish two messages, and let 30 seconds pass before the next proxy begins."""
        async with self.proxy() as world:
            await world.create(TOPIC, policy=policy)
            await world.publish(TOPIC, "a", "b")
            await world.let_pass(30)


@pytest.fixture
def silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Silent:
    return Silent(folder, monkeypatch)


async def test_an_owner_reads_the_age_of_messages_that_it_finds_and_returns_them_as_they_were(silent: Silent) -> None:
    await silent.fill()
    async with silent.proxy() as world:
        (host,) = world.served(TOPIC).hosts
        await until_ready(world, 2)
        assert (host.listener, gauges(world).oldest_age_seconds) == (None, 0.0), "clients have a chance to ask"
        await world.let_pass(GUESSED_SECONDS)
        await eventually(lambda: gauges(world).oldest_age_seconds == pytest.approx(30.0 + GUESSED_SECONDS))
        await world.let_pass(IDLE_SECONDS)
        await eventually(lambda: host.channel is None)
        for _ in range(3):
            await until_ready(world, 2)
            await world.settle_down()
            assert host.listener is None, "the age is known now"
        assert gauges(world).oldest_age_seconds == pytest.approx(30.0 + GUESSED_SECONDS + IDLE_SECONDS)
        assert gauges(world).polls == 0
        popped = await world.pop(TOPIC, count=2)
        assert [(one.message.body, one.delivery_count) for one in popped] == [(b"a", 1), (b"b", 1)]


async def test_the_owner_of_a_paused_group_takes_no_message_to_learn_its_age(silent: Silent) -> None:
    await silent.fill(policy=Policy(paused=True))
    async with silent.proxy() as world:
        await until_ready(world, 2)
        await world.let_pass(GUESSED_SECONDS)
        await world.engine.backlogs.look()
        await world.settle_down()
        assert world.served(TOPIC).hosts[0].listener is None
        assert gauges(world).oldest_age_seconds == pytest.approx(GUESSED_SECONDS), "since they were seen"


async def test_few_subscriptions_are_read_at_a_time(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    many = backlogs.READ_HEADS_MAX + 2
    async with silent.proxy() as world:
        for number in range(many):
            await world.create(f"{TOPIC}{number}")
            await world.publish(f"{TOPIC}{number}", "a")
    monkeypatch.setattr(Backlogs, "run", no_rounds)
    async with silent.proxy() as world:
        await world.engine.backlogs.look()
        await world.let_pass(GUESSED_SECONDS)
        reading: list[int] = []
        for _ in range(2):
            await world.engine.backlogs.look()
            await world.settle_down()
            reading.append(sum(one.hosts[0].listener is not None for one in world.engine.topics.served.values()))
    assert reading == [backlogs.READ_HEADS_MAX, many]
