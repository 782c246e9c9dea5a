"""Delays on RabbitMQ alone: deleted delay levels, killed nodes, adopted queues."""

import time

import pytest

from contract.brokers import rabbit_broker
from contract.recorder import TOPIC, Recorder, declare, layout, message
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, GroupName, Layout, Subscription, TopicName, dead_letter_queue
from popgate.ports.broker import Outgoing, PublishStatus
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions

BILLING = layout("billing")


def stamped(body: bytes, seconds: float) -> Message:
    return message(body)._replace(visible_at=time.time() + seconds)


def adopted(queue: BrokerQueue) -> Layout:
    subscription = Subscription(TopicName("legacy.orders"), GroupName("workers"))
    return Layout(subscription=subscription, queues=[queue], dead=dead_letter_queue(subscription), adopted=True)


async def test_a_deleted_level_is_declared_again(rabbitmq: RabbitNode, amqp_url: str) -> None:
    vhost = amqp_url.rsplit("/", 1)[1]
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as broker:
        await declare(broker, BILLING)
        listener = Recorder()
        await broker.consume(BILLING.queues[0], BILLING, 10, listener)
        for body in (b"before", b"after"):
            outgoing = Outgoing(message=stamped(body, 1), topic=TOPIC, delay_seconds=1)
            assert [one.status for one in await broker.publish([outgoing])] == [PublishStatus.PUBLISHED]
            await listener.until_count(1)
            assert listener.bodies == [body]
            listener.deliveries.clear()
            rabbitmq.api("DELETE", "queues", vhost, "popgate:delay:0")


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_delayed_message_reaches_an_adopted_queue_which_stays_as_it_is(
    rabbitmq: RabbitNode, amqp_url: str, kind: str
) -> None:
    vhost = amqp_url.rsplit("/", 1)[1]
    queue = BrokerQueue("their orders")
    body = {"durable": True, "arguments": {"x-queue-type": kind}}
    rabbitmq.api("PUT", "queues", vhost, queue, body=body)
    group = adopted(queue)
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as broker:
        await broker.declare_group(group)
        listener = Recorder()
        await broker.consume(queue, group, 10, listener)
        sent = stamped(b"a", 1)
        outgoing = Outgoing(message=sent, topic=group.subscription.topic, queue=queue, delay_seconds=1)
        assert [one.status for one in await broker.publish([outgoing])] == [PublishStatus.PUBLISHED]
        (delivery,) = await listener.until_count(1)
        assert time.time() >= (sent.visible_at or 0.0)
        assert delivery.message == sent, "nothing of the way shows"
        assert len(rabbitmq.api("GET", "queues", vhost, queue, "bindings")) == 1, "the default exchange's"
        await broker.delete_group(group)
        names = {row["name"] for row in rabbitmq.queues(vhost)}
        assert not any("popgate:delay:to:" in name for name in names)
        assert queue in names


async def test_delayed_messages_outlive_a_killed_node(fragile_node: RabbitNode) -> None:
    fragile_node.add_vhost("delays")
    options = RabbitOptions(amqp_urls=(fragile_node.amqp_url("delays"),), reconnect_seconds_max=0.5)
    async with rabbit_broker(options) as broker:
        await declare(broker, BILLING)
        sent = [stamped(b"%d" % seconds, seconds) for seconds in (1, 3, 30)]
        outgoing = [
            Outgoing(message=one, topic=TOPIC, delay_seconds=seconds)
            for one, seconds in zip(sent, (1, 3, 30), strict=True)
        ]
        assert [one.status for one in await broker.publish(outgoing)] == [PublishStatus.PUBLISHED] * 3
    fragile_node.sync()
    fragile_node.kill()
    fragile_node.start()
    async with rabbit_broker(options) as broker:
        listener = Recorder()
        await broker.consume(BILLING.queues[0], BILLING, 10, listener)
        await listener.until(lambda: b"3" in listener.bodies)
        # RabbitMQ may have moved the first one just before the kill. Then it moves it once more: at least once.
        assert list(dict.fromkeys(listener.bodies)) == [b"1", b"3"]
        assert time.time() >= (sent[1].visible_at or 0.0)
    fragile_node.delete_vhost("delays")
