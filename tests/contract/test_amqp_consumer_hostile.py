"""Programs directly on RabbitMQ handle and dead-letter messages that no well-behaved publisher sends."""

from struct import pack

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from contract.test_amqp_consumer import (
    DEAD,
    GROUP,
    QUEUE,
    TOPIC,
    brisk,
    channel,
    depth,
    publish,
    queues,
    running,
    until,
)
from contract.test_http_hostile_messages import HOSTILE, RawProperties, header, table
from popgate_client import Message, Reject, RequestInvalid
from popgate_client.amqp import AmqpConsumer

__all__ = ["brisk", "channel", "queues"]

KINDS = HOSTILE | {
    "a timestamp that is none, in a header": table(header("t", b"T" + pack(">Q", 2**64 - 1))),
    "a number that can't be written again": table(header("n", b"d" + pack(">d", 1e300))),
    "a content type that is no text": RawProperties(pack(">HB", 0x8000, 20) + b"\xff" * 20),
    "headers that leave no room": table(header("large", b"S" + pack(">I", 130_900) + b"x" * 130_900)),
}


async def test_hostile_messages_are_handled_and_dead_lettered_like_any_other(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    handled: list[Message] = []

    def handle(message: Message) -> None:
        handled.append(message)
        if message.text != "after":
            raise Reject("bad")

    for kind, properties in KINDS.items():
        channel.basic_publish("", QUEUE, kind.encode(), properties)
    publish(channel, "after")
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url)
    async with running(consumer):
        await until(lambda: bool(handled) and handled[-1].text == "after", "all to be handled")
    assert [message.text for message in handled] == [*KINDS, "after"]
    assert consumer.counters.rejected == len(KINDS)
    unreadable = next(message for message in handled if message.text == "a timestamp in nanoseconds")
    assert [*unreadable.headers] == ["amqp-unreadable-properties"]
    assert depth(channel) == 0
    letters = [channel.basic_get(DEAD, auto_ack=True) for _ in KINDS]
    assert [body for _, _, body in letters] == [kind.encode() for kind in KINDS]


async def test_a_dead_letter_whose_headers_fill_the_frame_shows_their_beginning(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    def handle(message: Message) -> None:
        raise Reject("bad")

    channel.basic_publish("", QUEUE, b"body", KINDS["headers that leave no room"])
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url)
    async with running(consumer):
        await until(lambda: consumer.counters.rejected == 1, "the dead letter")
    _, properties, body = channel.basic_get(DEAD, auto_ack=True)
    assert properties is not None
    headers = properties.headers or {}
    assert (body, headers["x-popgate-dead-reason"]) == (b"body", "bad")
    assert '{"large": "xxx' in str(headers["amqp-unreadable-headers"])


async def test_a_dead_letter_goes_to_no_other_queue_that_its_publisher_names(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    def handle(message: Message) -> None:
        raise Reject("bad")

    victim = queues[1]
    channel.exchange_declare("fanout", "fanout")
    channel.queue_bind(QUEUE, "fanout")
    channel.basic_publish("fanout", "", b"injected", pika.BasicProperties(headers={"CC": [victim]}))
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url)
    async with running(consumer):
        await until(lambda: consumer.counters.rejected >= 1, "the dead letter")
    assert consumer.counters.rejected == 1
    assert depth(channel, victim) == 0
    _, properties, body = channel.basic_get(DEAD, auto_ack=True)
    assert (body, properties and properties.headers and properties.headers["x-popgate-header-CC"]) == (
        b"injected",
        [victim],
    )


async def test_a_routing_key_that_is_no_text_ends_no_connection(
    amqp_url: str, queues: list[str], channel: BlockingChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Message] = []
    channel.exchange_declare("fanout", "fanout")
    channel.queue_bind(QUEUE, "fanout")
    monkeypatch.setattr("pika.data.encode_short_string", _raw_short_string)
    monkeypatch.setattr("pika.spec.data.encode_short_string", _raw_short_string)
    channel.basic_publish("fanout", "k\xff", b"body")
    async with running(AmqpConsumer(TOPIC, GROUP, handled.append, amqp_url=amqp_url)):
        await until(lambda: bool(handled), "the message")
    assert handled[0].headers["amqp-routing-key"] == "k?"


def _raw_short_string(pieces: list[bytes], value: str) -> int:
    encoded = value.encode("latin-1")
    pieces += [bytes([len(encoded)]), encoded]
    return 1 + len(encoded)


def test_no_part_of_a_password_is_shown_though_it_contains_a_comma() -> None:
    with pytest.raises(RequestInvalid) as caught:
        AmqpConsumer(TOPIC, GROUP, print, amqp_url="amqp://user:hunter2,x@host/")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RequestInvalid, match="'other://host'"):
        AmqpConsumer(TOPIC, GROUP, print, amqp_url="amqp://host,other://host")


async def test_a_panic_of_an_extension_is_a_failure_like_any_other(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    class PanicException(BaseException):
        pass

    handled: list[str] = []

    def handle(message: Message) -> None:
        if message.text == "poison":
            raise PanicException("on purpose")
        handled.append(message.text)

    publish(channel, "poison", "good")
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, max_deliveries=2, retry_initial_seconds=0.05)
    async with running(consumer):
        await until(lambda: handled == ["good"], "the good one")
    assert (consumer.counters.failed, depth(channel, DEAD), depth(channel)) == (2, 1, 0)
