"""Adopted queues whose messages have priorities: popgate hands out what RabbitMQ delivers, in the same order."""

from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from contract.http_server import Topic, put
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions

PRIORITIES = (0, 9, 4, 31, 5, None)
STRICT = ["31", "9", "5", "4", "None", "0"]
"""How 4.3 orders them: a message without a priority has the priority 4."""


@pytest.fixture
def proxy(amqp_url: str, tmp_path: Path) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url) as process:
        yield process


def adopt(proxy: ProxyProcess, queue: str) -> Topic:
    topic = Topic(proxy.client, "adopted")
    put(proxy.client, topic.admin_path, {"adopt": [queue]})
    put(proxy.client, f"{topic.admin_path}/groups/default")
    return topic


def test_the_order_is_that_of_a_plain_consumer(amqp_url: str, rabbitmq: RabbitNode, proxy: ProxyProcess) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    channel = connection.channel()
    for queue in ("theirs", "plain"):
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        for priority in PRIORITIES:
            channel.basic_publish("", queue, str(priority), pika.BasicProperties(priority=priority))
    plain: list[str] = []
    channel.basic_qos(prefetch_count=len(PRIORITIES))
    for _, _, body in channel.consume("plain", inactivity_timeout=20):
        plain.append((body or b"").decode())
        if len(plain) == len(PRIORITIES):
            break
    connection.close()
    topic = adopt(proxy, "theirs")
    handed_out: list[str] = []
    for _ in PRIORITIES:
        message = topic.pop_one(wait_seconds=10)
        handed_out.append(message["body"])
        assert topic.ack(message) == ["acked"]
    assert handed_out == plain
    if rabbitmq.release.version >= (4, 3):
        assert handed_out == STRICT


def test_messages_of_a_key_are_leased_one_after_the_other(amqp_url: str, proxy: ProxyProcess) -> None:
    """In the order in which RabbitMQ delivers them, which priorities may have changed."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    connection.channel().queue_declare("theirs", durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()
    topic = adopt(proxy, "theirs")
    for priority in (0, 9, 4):
        topic.publish(f"{priority}", ordering_key="k", headers={"amqp-priority": priority})
    seen: list[str] = []
    for _ in range(3):
        message = topic.pop_one(wait_seconds=10)
        seen.append(message["body"])
        assert topic.pop(max_messages=10) == [], "the others wait for it"
        assert topic.ack(message) == ["acked"]
    assert sorted(seen) == ["0", "4", "9"]
