"""Messages that no well-behaved publisher sends, directly to RabbitMQ: each is handed out, and blocks no other."""

from collections.abc import Callable
from struct import pack

import msgspec
import pika
import pytest
from pika.spec import BasicProperties

from contract.http_server import HttpServer, Json, Topic
from contract.http_server import lean_server as server
from contract.test_http_dead_letters import Desk
from contract.test_http_lease_groups import arrow_ipc, path, put_all
from support.rabbitmq import RabbitNode

__all__ = ["server"]

HEADERS, TIMESTAMP = 0x2000, 0x0040
TABLE_BYTES_MAX = 120_000
"""Bytes of a header table close to the largest header frame that RabbitMQ accepts."""


class RawProperties(BasicProperties):
    """Properties as bytes on the wire, which pika would not write."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self._raw = raw

    def encode(self) -> list[bytes]:
        return [self._raw]


def table(*fields: bytes) -> RawProperties:
    """Return properties that consist only of a header table with these fields."""
    joined = b"".join(fields)
    return RawProperties(pack(">HI", HEADERS, len(joined)) + joined)


def header(name: str | bytes, value: bytes) -> bytes:
    encoded = name.encode() if isinstance(name, str) else name
    return bytes([len(encoded)]) + encoded + value


def text(content: bytes) -> bytes:
    return b"S" + pack(">I", len(content)) + content


def nested(kind: bytes, levels: int) -> bytes:
    value = b"V"
    for _ in range(levels):
        inner = header("a", value) if kind == b"F" else value
        value = kind + pack(">I", len(inner)) + inner
    return value


HOSTILE: dict[str, RawProperties] = {
    "tables nested 489 deep": table(header("deep", nested(b"F", 489))),
    "arrays nested 9,000 deep": table(header("deep", nested(b"A", 9_000))),
    "a time of long ago": table(header("x-popgate-published-at", b"d" + pack(">d", -1e308))),
    "a time before 1970": table(header("x-popgate-visible-at", b"l" + pack(">q", -5))),
    "an expiry that is no number": table(header("x-popgate-expires-at", text(b"soon"))),
    "a timestamp in nanoseconds": RawProperties(pack(">HQ", TIMESTAMP, 1_795_000_000_000_000_000)),
    "a timestamp that is none": RawProperties(pack(">HQ", TIMESTAMP, 2**64 - 1)),
    "a copy id of another form": table(header("x-popgate-copy-id", text(b"not one"))),
    "a copy id of 100 KB": table(header("x-popgate-copy-id", text(b"0" * 100_000))),
    "an ordering key of 100 KB": table(header("x-popgate-ordering-key", text(b"k" * 100_000))),
    "headers that fill the frame": table(header("large", text(b"x" * TABLE_BYTES_MAX))),
    "headers that grow when they are written again": table(
        *(header(b"%04d" % number, b"b\x01") for number in range(TABLE_BYTES_MAX // 7))
    ),
    "a name of 255 bytes that is no text": table(header(b"\xff" * 255, b"t\x01")),
    "a message id that is no text": RawProperties(pack(">HB", 0x0080, 255) + b"\xff" * 255),
    "a copy id behind an escape": table(header("x-popgate-header-x-popgate-copy-id", text(b"f" * 32))),
    "a death that RabbitMQ did not write": table(header("x-death", b"t\x01")),
}


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    if server.broker != "rabbitmq":
        pytest.skip("only popgate publishes to the embedded broker")
    topic = server.topic()
    topic.policy(max_deliveries=100)
    return topic


@pytest.fixture
def publish_raw(server: HttpServer, rabbitmq: RabbitNode) -> Callable[[Topic, RawProperties], None]:
    def publish(topic: Topic, properties: RawProperties) -> None:
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.amqp_url(server.vhost))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish(f"popgate:{topic.name}", "0", b"hostile", properties, mandatory=True)

    return publish


@pytest.mark.rabbitmq_versions("3.10")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_message_is_handed_out_and_dead_lettered_like_any_other(
    server: HttpServer, topic: Topic, publish_raw: Callable[[Topic, RawProperties], None], kind: str
) -> None:
    topic.publish("before")
    publish_raw(topic, HOSTILE[kind])
    topic.publish("after")
    popped: dict[str, Json] = {message["body"]: message for message in topic.pop_all(3)}
    assert set(popped) == {"before", "hostile", "after"}
    desk = Desk(topic)
    desk.bury_popped([popped["hostile"]])
    (letter,) = desk.listed()
    assert (letter["body"], letter["cause"], letter["reason"]) == ("hostile", "rejected", "bad")
    assert letter["headers"] == popped["hostile"]["headers"]
    redrive = desk.redrive()
    if redrive["moved"]:
        assert topic.pop_one()["body"] == "hostile"
    else:
        assert (redrive["failed"], len(desk.listed())) == (1, 1)
        assert "bytes" in redrive["trouble"]
    assert topic.ack(popped["before"], popped["after"]) == ["acked", "acked"]
    assert server.process.is_running()


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack", "application/vnd.apache.arrow.stream"])
def test_a_lease_group_of_hostile_messages_can_be_read_in_every_format(
    topic: Topic, publish_raw: Callable[[Topic, RawProperties], None], accept: str
) -> None:
    """Its membership is frozen: one message that can't be represented would make a Spark batch fail forever."""
    for properties in HOSTILE.values():
        publish_raw(topic, properties)
    assert put_all(topic, len(HOSTILE), slices=1)["count"] == len(HOSTILE)
    response = topic.client.get(path(topic, "s", 1, "messages"), params={"slice": 0}, headers={"accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, accept), response.text
    match accept.rpartition("/")[2]:
        case "json":
            bodies = [message["body"] for message in response.json()["messages"]]
        case "msgpack":
            bodies = [message["body"].decode() for message in msgspec.msgpack.decode(response.content)["messages"]]
        case _:
            bodies = [row["body"].decode() for row in arrow_ipc.open_stream(response.content).read_all().to_pylist()]
    assert bodies == ["hostile"] * len(HOSTILE)


@pytest.mark.rabbitmq_versions("3.10")
def test_a_reply_to_that_closes_a_publishers_channel_disturbs_no_other_publisher(topic: Topic) -> None:
    headers = {"amqp-reply-to": "amq.rabbitmq.reply-to"}
    for number in range(5):
        topic.publish(f"hostile {number}", headers=headers)
        topic.publish(f"other {number}")
    messages = topic.pop_all(10)
    assert [message["headers"] for message in messages if message["body"].startswith("hostile")] == [headers] * 5
