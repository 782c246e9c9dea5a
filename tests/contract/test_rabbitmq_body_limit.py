"""Bodies larger than RabbitMQ's `max_message_size`, which closes the channel of their publisher."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from contract.brokers import rabbit_broker
from contract.conftest import BODY_BYTES_MAX
from contract.http_server import Topic, put
from contract.recorder import TOPIC, Recorder, declare, layout, message
from contract.test_http_dead_letters import Desk
from contract.test_http_hostile_messages import header, table, text
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

BILLING = layout("billing")
PUBLISHED, REFUSED = PublishStatus.PUBLISHED, PublishStatus.REFUSED


@pytest.fixture
def limited_url(fragile_node: RabbitNode) -> Iterator[str]:
    """A virtual host on a node that accepts bodies of at most `BODY_BYTES_MAX`."""
    fragile_node.start()
    fragile_node.add_vhost("limited")
    yield fragile_node.amqp_url("limited")
    fragile_node.delete_vhost("limited")


async def published(broker: RabbitBroker, *sizes: int) -> list[PublishOutcome]:
    return await broker.publish([Outgoing(message=message(b"x" * size), topic=TOPIC) for size in sizes])


@pytest.mark.rabbitmq_versions
async def test_a_body_that_rabbitmq_does_not_take_is_refused_alone(limited_url: str) -> None:
    async with rabbit_broker(RabbitOptions(amqp_urls=(limited_url,))) as broker:
        await declare(broker, BILLING)

        async def others() -> list[PublishOutcome]:
            return [outcome for _ in range(200) for outcome in await published(broker, 10)]

        working = asyncio.create_task(others())
        for _ in range(3):
            outcomes = await published(broker, 1, BODY_BYTES_MAX, BODY_BYTES_MAX + 1, 2)
            assert [outcome.status for outcome in outcomes] == [PUBLISHED, PUBLISHED, REFUSED, PUBLISHED]
            assert f"{BODY_BYTES_MAX + 1} bytes, and RabbitMQ takes {BODY_BYTES_MAX}" in outcomes[2].detail
            assert outcomes[2].unfit
        assert {outcome.status for outcome in await working} == {PUBLISHED}


async def test_a_body_in_every_size_that_rabbitmq_takes_is_published_once(amqp_url: str) -> None:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as broker:
        await declare(broker, BILLING)
        sizes = [1 << shift for shift in range(15, 22)]
        for size in sizes:
            assert [outcome.status for outcome in await published(broker, size, size + 1)] == [PUBLISHED] * 2
        listener = Recorder()
        await broker.consume(BILLING.queues[0], BILLING, 100, listener)
        await listener.until_count(2 * len(sizes))
        assert [len(body) for body in listener.bodies] == [size + more for size in sizes for more in (0, 1)]


def test_a_letter_that_is_too_large_when_packed_keeps_its_body(limited_url: str, tmp_path: Path) -> None:
    body = b"b" * BODY_BYTES_MAX
    with ProxyProcess(tmp_path, "--amqp-url", limited_url) as proxy:
        topic = Topic(proxy.client, "orders")
        put(proxy.client, topic.admin_path, {"queues": 1})
        put(proxy.client, f"{topic.admin_path}/groups/default")
        with pika.BlockingConnection(pika.URLParameters(limited_url)) as connection:
            properties = table(header("large", text(b"x" * 130_900)))  # popgate's own do not fit
            connection.channel().basic_publish("popgate:orders", "0", body, properties)
        desk = Desk(topic)
        desk.bury_popped([topic.pop_one()])
        (letter,) = desk.listed()
        assert (letter["body"].encode(), letter["headers"], letter["cause"]) == (body, {}, "rejected")
