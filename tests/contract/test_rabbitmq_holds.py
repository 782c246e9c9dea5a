"""Two proxies on one RabbitMQ: a proxy that takes a queue over consumes it once the other one holds none of its
messages.
"""
# pyright: reportPrivateUsage=false
# A connection is cut from inside.

import asyncio
from collections.abc import AsyncIterator

import pytest

from contract.brokers import rabbit_broker
from contract.recorder import Recorder, declare, layout, numbered, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.errors import BrokerUnavailable
from popgate.ports.broker import Channel
from support.audit_client import until

pytestmark = pytest.mark.rabbitmq_versions

BILLING = layout("billing")
QUEUE = BILLING.queues[0]
LOOK_SECONDS = 0.5
"""Seconds; several times as long as a proxy waits before it tries again."""


@pytest.fixture
def options(amqp_url: str) -> RabbitOptions:
    return RabbitOptions(amqp_urls=(amqp_url,), cluster="one", heartbeat_seconds=2)


@pytest.fixture
async def former(options: RabbitOptions) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(options) as broker:
        await declare(broker, BILLING)
        yield broker


@pytest.fixture
async def latter(options: RabbitOptions, former: RabbitBroker) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(options) as broker:
        yield broker


def consuming(broker: RabbitBroker, recorder: Recorder, prefetch: int = 10) -> asyncio.Task[Channel]:
    return asyncio.create_task(broker.consume(QUEUE, BILLING, prefetch, recorder), name="consume")


@pytest.mark.parametrize("prefetch", [0, 5])
async def test_what_is_held_comes_first_also_where_nothing_is_consumed_at_the_moment(
    former: RabbitBroker, latter: RabbitBroker, prefetch: int
) -> None:
    """A paused consumer, or one whose prefetch changes, does not count: RabbitMQ would give the next one later
    messages.
    """
    mine, theirs = Recorder(), Recorder()
    channel = await consuming(former, mine, prefetch=3)
    await publish(former, numbered(1, 6))
    await mine.until_count(3)
    waiting = consuming(latter, theirs)
    await channel.resize(prefetch)
    await asyncio.sleep(LOOK_SECONDS)
    assert not waiting.done()
    assert not theirs.deliveries
    await channel.close()
    await asyncio.sleep(LOOK_SECONDS)
    assert not waiting.done(), "a channel that is closed is not yet a queue that is let go"
    await former.let_go(QUEUE)
    await waiting
    await theirs.until_count(6)
    assert theirs.bodies == numbered(1, 6)


async def test_who_opens_its_channel_again_does_not_wait_for_itself(former: RabbitBroker) -> None:
    for _ in range(3):
        channel = await consuming(former, Recorder())
        await channel.close()
    await former.let_go(QUEUE)
    await former.let_go(QUEUE)
    await consuming(former, Recorder())


async def test_a_queue_is_free_when_the_connection_of_whoever_held_it_has_ended(
    former: RabbitBroker, latter: RabbitBroker
) -> None:
    mine, theirs = Recorder(), Recorder()
    await consuming(former, mine)
    waiting = consuming(latter, theirs)
    await former.stop()
    await waiting
    await publish(latter, [b"a"])
    await theirs.until_count(1)


async def test_who_waits_and_is_to_consume_no_longer_stops_waiting_and_leaves_nothing_behind(
    former: RabbitBroker, latter: RabbitBroker, options: RabbitOptions
) -> None:
    await consuming(former, Recorder())
    waiting = consuming(latter, Recorder())
    await asyncio.sleep(LOOK_SECONDS)
    await latter.let_go(QUEUE)
    with pytest.raises(BrokerUnavailable):
        await waiting
    await former.stop()
    async with rabbit_broker(options) as third:
        await consuming(third, Recorder())


async def test_let_go_and_taken_again_at_once_is_held(former: RabbitBroker, latter: RabbitBroker) -> None:
    for _ in range(20):
        taking = consuming(former, Recorder())
        await asyncio.sleep(0)
        letting_go = asyncio.create_task(former.let_go(QUEUE))
        await asyncio.sleep(0)
        again = consuming(former, Recorder())
        results = await asyncio.gather(taking, letting_go, again, return_exceptions=True)
        for channel in (results[0], results[2]):
            if not isinstance(channel, BaseException):
                await channel.close()
    waiting = consuming(latter, Recorder())
    await asyncio.sleep(LOOK_SECONDS)
    assert not waiting.done()
    await former.let_go(QUEUE)
    await waiting


async def test_a_lost_connection_is_no_reason_to_wait(former: RabbitBroker) -> None:
    mine = Recorder()
    await consuming(former, mine)
    former._consume.session().interceptor.abort()
    await mine.until_lost()
    await until(lambda: former.unavailable_reason() is None, timeout_seconds=10, what="a new connection")
    async with asyncio.timeout(10):
        await consuming(former, Recorder())
