"""A publisher that knows everything except popgate's secret can't cause another's message to settle, collide or move.

It reads each header of popgate's messages, and publishes directly to RabbitMQ.
"""

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from contract.http_server import HttpServer, Topic, put
from contract.http_server import lean_server as server
from contract.test_http_dead_letters import Desk
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

__all__ = ["server"]

COPY_ID, IDENTITY = "x-popgate-copy-id", "x-popgate-identity"


class Forger:
    """Reads the messages of a topic, and publishes forged ones to its queues."""

    def __init__(self, channel: BlockingChannel, topic: Topic) -> None:
        self._channel = channel
        self._topic = topic
        self._spying = channel.queue_declare("", exclusive=True).method.queue
        for number in range(2):
            channel.queue_bind(self._spying, f"popgate:{topic.name}", str(number))
        channel.confirm_delivery()

    def seen(self) -> dict[str, Any]:
        """Return the headers of the next published message."""
        _, properties, _ = self._channel.basic_get(self._spying, auto_ack=True)
        assert properties is not None
        assert properties.headers is not None
        return dict(properties.headers)

    def publish(self, headers: dict[str, Any], queue: str = "default:0") -> None:
        """Publish the body "forged" with these headers."""
        properties = pika.BasicProperties(headers=headers)
        name = f"popgate:{self._topic.name}:{queue}"
        self._channel.basic_publish("", name, b"forged", properties, mandatory=True)


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    if server.broker != "rabbitmq":
        pytest.skip("only popgate publishes to the embedded broker")
    return server.topic(queues=2)


@pytest.fixture
def forger(server: HttpServer, rabbitmq: RabbitNode, topic: Topic) -> Iterator[Forger]:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.amqp_url(server.vhost))) as connection:
        yield Forger(connection.channel(), topic)


def without_tag(headers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if name != IDENTITY}


def with_another_tag(headers: dict[str, Any]) -> dict[str, Any]:
    return {**headers, IDENTITY: headers[IDENTITY][:-1] + ("0" if headers[IDENTITY][-1] != "0" else "1")}


@pytest.mark.parametrize("forge", [without_tag, with_another_tag])
def test_a_forged_copy_of_a_leased_message_is_a_message_of_its_own(topic: Topic, forger: Forger, forge: Any) -> None:
    topic.publish("original")
    forged = forge(forger.seen())
    original = topic.pop_one(invisibility_seconds=60)
    for number in range(2):
        forger.publish(forged, f"default:{number}")
    for message in topic.pop_all(2):
        assert message["body"] == "forged"
        assert topic.ack(message) == ["acked"]
    release = {"receipt_handle": original["receipt_handle"], "delay_seconds": 0}
    assert topic.settle("release", [release])[0]["status"] == "released"
    again = topic.pop_one()
    assert (again["body"], again["delivery_count"]) == ("original", 2)
    assert topic.ack(again) == ["acked"]


def test_a_whole_identity_means_nothing_in_another_queue(topic: Topic, forger: Forger) -> None:
    number = topic_queue_of(topic, forger)
    topic.publish("original", ordering_key="a")
    headers = forger.seen()
    original = topic.pop_one(invisibility_seconds=60)
    forger.publish(headers, f"default:{1 - number}")
    forged = topic.pop_one()
    assert topic.ack(forged, original) == ["acked", "acked"]
    assert "amqp-x-popgate-copy-id" not in forged["headers"]


def test_a_repeat_of_a_whole_message_harms_only_itself(topic: Topic, forger: Forger) -> None:
    """It is the same copy in the same queue: a repeated delivery, as after a lost confirm."""
    number = topic_queue_of(topic, forger)
    topic.publish("original", ordering_key="a")
    headers = forger.seen()
    original = topic.pop_one(invisibility_seconds=60)
    forger.publish(headers, f"default:{number}")
    topic.publish("next", ordering_key="b")
    assert [message["body"] for message in topic.pop_all(1)] == ["next"]
    assert topic.ack(original) == ["acked"]


def topic_queue_of(topic: Topic, forger: Forger) -> int:
    """Return the queue of the ordering key "a"."""
    topic.publish("where", ordering_key="a")
    forger.seen()
    message = topic.pop_one()
    assert topic.ack(message) == ["acked"]
    return int(message["queue"])


def test_a_forged_dead_letter_moves_no_other_one(topic: Topic, forger: Forger, rabbitmq: RabbitNode) -> None:
    desk = Desk(topic)
    topic.publish("original")
    forger.seen()
    desk.bury_popped([topic.pop_one()])
    (letter,) = desk.listed()
    forger.publish({COPY_ID: letter["id"]}, "default:dead")
    bodies = {listed["body"]: listed["id"] for listed in desk.listed()}
    assert bodies.keys() == {"original", "forged"}
    assert bodies["original"] == letter["id"] != bodies["forged"]
    assert desk.redrive()["moved"] == 2
    assert {message["body"] for message in topic.pop_all(2)} == {"original", "forged"}


UNTAGGED, FORMER = "untagged", "of the former secret"
SECRET, FORMER_SECRET = "the secret of these proxies", "the secret of before"


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (UNTAGGED, {"POPGATE_SECRET": SECRET, "POPGATE_ACCEPT_UNTAGGED": "true"}),
        (FORMER, {"POPGATE_SECRET_FILE": "../secrets"}),
    ],
)
def test_older_messages_keep_their_identity_over_a_restart_only_if_the_operator_says_so(
    rabbitmq: RabbitNode, tmp_path: Path, kind: str, setting: dict[str, str]
) -> None:
    """The lease of an identified message survives a restart of the proxy."""
    vhost, folder = f"forged-{token_hex(4)}", tmp_path / "proxy"
    rabbitmq.add_vhost(vhost)
    (tmp_path / "secrets").write_text(f"{SECRET}\n{FORMER_SECRET}\n")
    (tmp_path / "secrets").chmod(0o600)
    flags = ["--amqp-url", rabbitmq.amqp_url(vhost), "--auto-create", "true"]
    with ProxyProcess(folder, *flags, environment={"POPGATE_SECRET": FORMER_SECRET}, name="former") as former:
        topic = Topic(former.client, "orders")
        put(topic.client, topic.admin_path, {"queues": 1})
        put(topic.client, f"{topic.admin_path}/groups/default")
        if kind is FORMER:
            topic.publish("old")
    if kind is UNTAGGED:
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.amqp_url(vhost))) as connection:
            properties = pika.BasicProperties(headers={COPY_ID: f"{7:032x}"})
            connection.channel().basic_publish("popgate:orders", "0", b"old", properties, mandatory=True)
    for environment, is_known in ((setting, False), (setting, True), ({"POPGATE_SECRET": SECRET}, False)):
        data = former.data_folder
        with ProxyProcess(folder, *flags, environment=environment, data_folder=data, name="next") as proxy:
            messages = Topic(proxy.client, "orders").pop(wait_seconds=1, invisibility_seconds=60)
        assert bool(messages) is not is_known
    rabbitmq.delete_vhost(vhost)
