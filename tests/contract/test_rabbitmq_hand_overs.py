"""Queues that change hands repeatedly: RabbitMQ's delivery counts, and what it does with counted messages."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import pika
import pytest
from yarl import URL

from contract.brokers import KEYS, rabbit_broker
from contract.recorder import Recorder, declare, layout, numbered, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.channel import RabbitChannel
from popgate.adapters.rabbitmq.consumption import Consumption
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import Session
from popgate.domain.names import BrokerQueue, Layout
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions

LEGACY = BrokerQueue("legacy.orders")
HAND_OVERS = 100
DEFAULT_LIMIT = 20
"""The delivery limit of RabbitMQ 4 for queues without an explicit one."""
CLOSE_SECONDS_MAX = {500: 0.5, 10_000: 2.0}


def adopted() -> Layout:
    own = layout()
    return Layout(subscription=own.subscription, queues=[LEGACY], dead=own.dead, adopted=True)


@pytest.fixture
async def broker(amqp_url: str) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as rabbit:
        yield rabbit


async def fill(amqp_url: str, count: int, **arguments: Any) -> None:
    """Declare the adopted queue, and put numbers into it."""
    await asyncio.to_thread(_fill, amqp_url, numbered(1, count), arguments)


def _fill(amqp_url: str, bodies: list[bytes], arguments: dict[str, Any]) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    channel = connection.channel()
    channel.queue_declare(LEGACY, durable=True, arguments={"x-queue-type": "quorum", **arguments})
    for body in bodies:
        channel.basic_publish("", LEGACY, body)
    connection.close()


async def hand_over(broker: RabbitBroker, queue: BrokerQueue, queues: Layout, count: int) -> Recorder:
    """Hold ``count`` messages, and give them back as a hand-over does; return the deliveries."""
    listener = Recorder()
    channel = await broker.consume(queue, queues, count, listener)
    await listener.until_count(count)
    await channel.close()
    await broker.let_go(queue)
    return listener


@pytest.mark.parametrize("single_active", [False, True])
async def test_an_adopted_queue_with_the_default_limit_survives_a_hundred_hand_overs_from_4_3_on(
    broker: RabbitBroker, amqp_url: str, rabbitmq: RabbitNode, single_active: bool
) -> None:
    await fill(amqp_url, 50, **({"x-single-active-consumer": True} if single_active else {}))
    version = rabbitmq.release.version
    is_free, is_unlimited = version >= (4, 3), version < (4,)
    for number in range(HAND_OVERS if is_free else DEFAULT_LIMIT):
        listener = await hand_over(broker, LEGACY, adopted(), 50)
        assert listener.bodies == numbered(1, 50), number
        assert {delivery.earlier_deliveries for delivery in listener.deliveries} == {number}
    warnings = " ".join((await broker.inspect(LEGACY)).warnings)
    if is_free or is_unlimited:
        assert (await hand_over(broker, LEGACY, adopted(), 50)).bodies == numbered(1, 50)
    else:  # and popgate has reported it
        assert "drops a message that came back 20 times" in warnings
    assert "delivery-limit 2000000000" in warnings


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count", CLOSE_SECONDS_MAX)
async def test_what_is_in_flight_changes_hands_in_order_and_at_once(
    broker: RabbitBroker, amqp_url: str, count: int, own: bool
) -> None:
    if own:
        queues = layout()
        await declare(broker, queues)
        await publish(broker, numbered(1, count))
    else:
        queues = adopted()
        await fill(amqp_url, count, **{"x-delivery-limit": 2_000_000_000})
    queue = queues.queues[0]
    listener, again = Recorder(), Recorder()
    channel = await broker.consume(queue, queues, count, listener)
    await listener.until_count(count)
    settled = listener.tags[10:20]
    channel.ack(settled)
    started = monotonic()
    await channel.close()
    await broker.let_go(queue)
    await broker.consume(queue, queues, count, again)
    await again.until_count(1)
    assert monotonic() - started < CLOSE_SECONDS_MAX[count]
    await again.until_count(count - 10)
    assert again.bodies == numbered(1, 10) + numbered(21, count)
    assert len(listener.deliveries) == count


async def test_messages_of_a_cancelled_consumer_go_before_those_that_its_successor_got_meanwhile(
    broker: RabbitBroker, amqp_url: str
) -> None:
    """This happens if a channel ends while it is being resized, and its successor already waits: RabbitMQ starts the
    successor when it cancels the consumer, and returns that one's messages when it learns of the channel's end.
    """
    own = layout()
    queue = own.queues[0]
    await declare(broker, own)
    held, taken = Recorder(), Recorder()
    holder = await broker.consume(queue, own, 5, held)
    await publish(broker, numbered(0, 9))
    await held.until_count(5)
    what = Consumption(
        queue=queue, consumer_timeout_seconds=1800.0, asked_timeout_seconds=1800.0, check_tag=KEYS.checker(queue)
    )
    session = await Session.connect(RabbitOptions(amqp_urls=(amqp_url,)), URL(amqp_url), "test", connect_seconds=20)
    successor = await RabbitChannel.open(session, what, 2, taken)
    await holder.resize(0)
    await asyncio.sleep(0.3)  # the successor has its first two messages
    await holder.close()
    await taken.until_count(2)
    await successor.resize(100)
    await taken.until_count(10)
    returned = [delivery.returned for delivery in taken.deliveries]
    new = taken.bodies[returned.index(False) :]
    assert set(new) <= set(numbered(7, 9)), list(zip(taken.bodies, returned, strict=True))
    assert sorted(taken.bodies) == numbered(0, 9)
    await successor.close()
    await session.close()
