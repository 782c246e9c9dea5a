"""How old messages on RabbitMQ are, after a restart of popgate and before any client asks.

RabbitMQ does not tell it, and a basic.get or a consumer changes what it counts. popgate's own queues are read once,
which changes no delivery count that clients see. Adopted queues are left alone.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pika
import pytest

from popgate.engine.queue.waiting_since import GUESSED_SECONDS
from popgate.engine.subscription.gauges import SubscriptionGauges
from popgate.runtime.clocks import ManualClock
from support.engines import World, eventually, open_world

pytestmark = pytest.mark.rabbitmq_versions
TOPIC, LEGACY = "t", "legacy.orders"
IDLE_SECONDS = 20.0


class Site:
    """A RabbitMQ, and the data folder of the proxies that use it one after the other."""

    def __init__(self, folder: Path, amqp_url: str) -> None:
        self.amqp_url = amqp_url
        self.clock = ManualClock()
        self._folder = folder

    @asynccontextmanager
    async def proxy(self) -> AsyncGenerator[World]:
        async with open_world(
            self._folder, amqp_url=self.amqp_url, clock=self.clock, idle_return_seconds=IDLE_SECONDS
        ) as world:
            yield world


@pytest.fixture
def site(tmp_path: Path, amqp_url: str) -> Site:
    return Site(tmp_path, amqp_url)


async def gauges(world: World) -> SubscriptionGauges:
    """Return the gauges after a reading of the backlogs."""
    assert await world.engine.backlogs.look()
    (found,) = world.engine.gauges()
    return found


async def until_ready(world: World, count: int) -> None:
    """Wait until RabbitMQ counts the messages."""
    async with asyncio.timeout(20):
        while True:
            if (await gauges(world)).ready == count:
                return
            await asyncio.sleep(0.05)


async def test_a_restart_does_not_make_messages_younger_and_counts_no_delivery(site: Site) -> None:
    async with site.proxy() as world:
        await world.create(TOPIC)
        await world.publish(TOPIC, "a", "b")
    site.clock.advance(600)
    async with site.proxy() as world:
        await until_ready(world, 2)
        assert (await gauges(world)).oldest_age_seconds == 0.0, "at least"
        await world.let_pass(GUESSED_SECONDS)
        await gauges(world)
        (host,) = world.served(TOPIC).hosts
        await eventually(lambda: len(host.messages()) == 2)
        assert (await gauges(world)).oldest_age_seconds == pytest.approx(600 + GUESSED_SECONDS)
        await world.let_pass(IDLE_SECONDS)
        await eventually(lambda: host.listener is None)
        await until_ready(world, 2)
        found = await gauges(world)
        assert found.oldest_age_seconds == pytest.approx(600 + GUESSED_SECONDS + IDLE_SECONDS)
        assert (found.polls, found.ready_buffered) == (0, 0)
        assert host.listener is None, "it is not read again"
        popped = [*await world.pop(TOPIC, count=2, wait=10)]
        popped += await world.pop(TOPIC, count=2 - len(popped), wait=10) if len(popped) < 2 else []
        assert [(one.message.body, one.delivery_count) for one in popped] == [(b"a", 1), (b"b", 1)]


async def test_an_adopted_queue_is_left_alone_and_its_age_counts_from_when_it_was_seen(site: Site) -> None:
    await asyncio.to_thread(declare_and_fill, site.amqp_url)
    async with site.proxy() as world:
        await world.engine.changes.put_topic(TOPIC, queues=None, adopt=[LEGACY])
        await world.engine.changes.put_group(TOPIC, "default", None)
        await until_ready(world, 1)
        await world.let_pass(GUESSED_SECONDS)
        assert (await gauges(world)).oldest_age_seconds == pytest.approx(GUESSED_SECONDS)
        await world.settle_down()
        assert world.served(TOPIC).hosts[0].listener is None
    assert await asyncio.to_thread(deliveries, site.amqp_url) == (False, 0)


def declare_and_fill(amqp_url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": 20}
        channel.queue_declare(LEGACY, durable=True, arguments=arguments)
        channel.confirm_delivery()
        channel.basic_publish("", LEGACY, b"a")


def deliveries(amqp_url: str) -> tuple[bool, object]:
    """Take the first message by AMQP. Return whether RabbitMQ has delivered it before, and how often it has failed."""
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        method, properties, _ = connection.channel().basic_get(LEGACY, auto_ack=True)
        assert method is not None
        assert properties is not None
        return method.redelivered, (properties.headers or {}).get("x-delivery-count", 0)
