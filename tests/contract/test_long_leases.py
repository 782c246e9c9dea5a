"""Leases that last many times RabbitMQ's consumer_timeout (here 1.5 s): each is requeued and taken again in time,
alone.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from contract.conftest import CONSUMER_TIMEOUT_SECONDS
from contract.http_server import Json, Topic, put
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions
LONG_SECONDS = 3 * CONSUMER_TIMEOUT_SECONDS
ARGUMENTS = ["--consumer-timeout-seconds", str(CONSUMER_TIMEOUT_SECONDS)]


@pytest.fixture
def vhost(fragile_node: RabbitNode) -> Iterator[str]:
    fragile_node.start()
    with fragile_node.own_vhost("long") as name:
        yield name


@pytest.fixture
def proxy(fragile_node: RabbitNode, vhost: str, tmp_path: Path) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", fragile_node.amqp_url(vhost), *ARGUMENTS) as process:
        yield process


@pytest.fixture
def topic(proxy: ProxyProcess) -> Topic:
    topic = Topic(proxy.client, "long")
    put(proxy.client, topic.admin_path, {"queues": 1})
    put(proxy.client, f"{topic.admin_path}/groups/default")
    return topic


def channels_lost(proxy: ProxyProcess) -> int:
    return proxy.output.count("a channel was lost")


def stay_busy(topic: Topic, seconds: float) -> None:
    """Pop, publish and ack all the time, as other clients do."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        topic.publish("busy", headers={"busy": True})
        for message in topic.pop(max_messages=10, wait_seconds=1, filter={"busy": True}):
            assert topic.ack(message) == ["acked"]
        time.sleep(0.05)


def is_re_homed(node: RabbitNode, vhost: str) -> bool:
    """Tell whether RabbitMQ has delivered a message of this virtual host more than once."""

    def counted(name: str) -> bool:
        return any(queue.get("message_stats", {}).get(name, 0) for queue in node.queues(vhost))

    # A queue reports its counts every few seconds, and on a busy machine it may have left out some reports.
    wait_until(lambda: counted("deliver"), timeout_seconds=20, what="counts in the management interface")
    return counted("redeliver")


def never_re_homes(node: RabbitNode) -> bool:
    """Tell whether popgate asks quorum queues of this version for a timeout longer than any lease."""
    return node.release.version >= (4, 3)


def test_a_lease_outlasts_the_consumer_timeout_and_touches_nobody(
    proxy: ProxyProcess, topic: Topic, fragile_node: RabbitNode, vhost: str
) -> None:
    topic.publish(*map(str, range(20)))
    leased = topic.pop_all(10, invisibility_seconds=60)
    stay_busy(topic, LONG_SECONDS)
    assert channels_lost(proxy) == 0
    assert is_re_homed(fragile_node, vhost) is not never_re_homes(fragile_node)
    assert topic.state()["in_flight"] == 10
    assert topic.ack(*leased) == ["acked"] * 10
    rest = topic.pop_all(10)
    # Later messages overtake a message without an ordering key that is being taken anew at this moment.
    assert sorted(message["body"] for message in rest) == [str(number) for number in range(10, 20)], "and no other"
    assert {message["delivery_count"] for message in rest} == {1}
    assert topic.ack(*rest) == ["acked"] * 10
    assert topic.pop(wait_seconds=1) == []
    state = topic.state()
    assert (state["ready"], state["in_flight"]) == (0, 0)


def test_order_is_kept_while_leases_and_buffered_messages_are_taken_anew(proxy: ProxyProcess, topic: Topic) -> None:
    for key in "ab":
        topic.publish(*(f"{key}{number}" for number in range(6)), ordering_key=key)
    first = topic.pop(max_messages=1, wait_seconds=2, invisibility_seconds=60)[0]
    stay_busy(topic, LONG_SECONDS)
    assert channels_lost(proxy) == 0
    key = first["body"][0]
    assert topic.settle("release", [{"receipt_handle": first["receipt_handle"]}])[0]["status"] == "released"
    seen: dict[str, list[str]] = {"a": [], "b": []}
    while sum(map(len, seen.values())) < 12:
        messages = topic.pop(max_messages=3, wait_seconds=2)
        assert messages
        for message in messages:
            seen[message["body"][0]].append(message["body"])
        assert set(topic.ack(*messages)) == {"acked"}
    assert seen == {key: [f"{key}{number}" for number in range(6)] for key in "ab"}, key


def test_a_long_lease_expires_when_it_should_and_comes_again(proxy: ProxyProcess, topic: Topic) -> None:
    topic.publish("a")
    leased_at = time.monotonic()
    topic.pop_one(invisibility_seconds=LONG_SECONDS)
    again: list[Json] = []
    while not again:
        again = topic.pop(wait_seconds=5)
    assert time.monotonic() - leased_at >= LONG_SECONDS - 0.1
    assert again[0]["delivery_count"] == 2
    assert channels_lost(proxy) == 0


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_an_unidentified_lease_ends_in_time_and_its_neighbours_stay(
    fragile_node: RabbitNode, vhost: str, proxy: ProxyProcess, kind: str
) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(fragile_node.amqp_url(vhost)))
    channel = connection.channel()
    channel.queue_declare("theirs", durable=True, arguments={"x-queue-type": kind})
    for body in (b"old", b"new"):
        channel.basic_publish("", "theirs", body)
    topic = Topic(proxy.client, "adopted")
    put(proxy.client, topic.admin_path, {"adopt": ["theirs"]})
    put(proxy.client, f"{topic.admin_path}/groups/default")
    old = topic.pop_one(invisibility_seconds=60)
    assert old["body"] == "old"
    if kind == "quorum" and never_re_homes(fragile_node):
        (new,) = topic.pop(wait_seconds=LONG_SECONDS)
        assert topic.pop(wait_seconds=LONG_SECONDS) == []
        assert topic.ack(old, new) == ["acked"] * 2
        assert not is_re_homed(fragile_node, vhost)
        connection.close()
        return
    again = topic.pop_one(wait_seconds=10, filter={"absent": None})
    while again["body"] != "old":
        assert topic.ack(again) == ["acked"], "its neighbour"
        again = topic.pop_one(wait_seconds=10)
    assert channels_lost(proxy) == 0
    assert topic.ack(old) == ["expired"]
    assert topic.ack(again) == ["acked"]
    connection.close()
