"""Queues that others declared and fill: how popgate inspects them, and how it represents their messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from contract.brokers import rabbit_broker
from contract.recorder import TOPIC, WAIT_SECONDS, Recorder, declare, layout, message, numbered, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.errors import Conflict, QueueGone
from popgate.domain.names import BrokerQueue, GroupName, Layout, Subscription, dead_letter_queue
from popgate.ports.broker import Outgoing
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions
LEGACY = BrokerQueue("legacy.orders")
KINDS: dict[str, dict[str, Any]] = {"classic": {}, "quorum": {"x-queue-type": "quorum"}}


def adopted(*queues: BrokerQueue, unique_message_ids: bool = False) -> Layout:
    subscription = Subscription(TOPIC, GroupName("default"))
    return Layout(
        subscription=subscription,
        queues=queues or [LEGACY],
        dead=dead_letter_queue(subscription),
        adopted=True,
        unique_message_ids=unique_message_ids,
    )


@pytest.fixture
async def broker(amqp_url: str) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as rabbit:
        yield rabbit


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def foreign(amqp_url: str, work: Callable[[BlockingChannel], object]) -> None:
    """Act as a program that knows nothing of popgate."""

    def run() -> None:
        connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
        try:
            work(connection.channel())
        finally:
            connection.close()

    await asyncio.to_thread(run)


def declares(
    queue: str, *, durable: bool = True, auto_delete: bool = False, arguments: dict[str, Any] | None = None
) -> Callable[[BlockingChannel], object]:
    return lambda channel: channel.queue_declare(queue, durable=durable, auto_delete=auto_delete, arguments=arguments)


def take(*_: object) -> None:
    """Run a consumer that keeps its messages."""


def publishes(body: bytes, *, properties: pika.BasicProperties | None = None) -> Callable[[BlockingChannel], object]:
    return lambda channel: channel.basic_publish("", LEGACY, body, properties)


# ---------------------------------------------------------------- looking


@pytest.mark.parametrize(
    ("options", "kind", "warning"),
    [
        ({}, "classic", ""),
        ({"arguments": {"x-queue-type": "classic"}}, "classic", ""),
        ({"durable": False}, "classic", "not durable"),
        ({"auto_delete": True}, "classic", "auto_delete"),
        ({"arguments": {"x-message-ttl": 60_000, "x-max-length": 9, "x-overflow": "reject-publish"}}, "classic", ""),
        ({"arguments": {"x-max-priority": 5, "x-single-active-consumer": True}}, "classic", ""),
        ({"arguments": {"x-expires": 60_000, "x-dead-letter-exchange": "o'brien"}}, "classic", "x-expires"),
        ({"arguments": {"x-queue-type": "stream"}}, "stream", "can't be adopted"),
        ({"arguments": {"x-queue-type": "stream", "x-max-age": "1h"}}, "stream", "can't be adopted"),
    ],
)
async def test_the_kind_of_a_queue_and_its_dangers_are_found_out(
    broker: RabbitBroker, amqp_url: str, options: dict[str, Any], kind: str, warning: str
) -> None:
    await foreign(amqp_url, declares(LEGACY, **options))
    facts = await broker.inspect(LEGACY)
    assert facts.exists
    assert facts.kind == kind
    assert len(facts.warnings) == (1 if warning else 0)
    assert warning in "".join(facts.warnings)


@pytest.mark.parametrize(
    ("limit", "since_3", "since_4", "since_4_3"),
    [
        (None, "end of the queue: set", "came back 20 times", "channel ended 20 times"),
        (3, "came back 3 times", "came back 3 times", "came back 3 times"),
        (-1, "came back -1 times", "end of the queue: set", ""),
        (2_000_000_000, "", "", ""),
    ],
)
@pytest.mark.parametrize("disconnected_timeout", [None, 500])
async def test_what_a_quorum_queue_does_to_messages_is_told_with_the_policy_that_mends_it(
    broker: RabbitBroker,
    amqp_url: str,
    rabbitmq: RabbitNode,
    limit: int | None,
    since_3: str,
    since_4: str,
    since_4_3: str,
    disconnected_timeout: int | None,
) -> None:
    version = rabbitmq.release.version
    arguments: dict[str, Any] = {"x-queue-type": "quorum"}
    if limit is not None:
        arguments["x-delivery-limit"] = limit
    if disconnected_timeout is not None:
        if version < (4,):
            pytest.skip("RabbitMQ 3 refuses the argument")
        arguments["x-consumer-disconnected-timeout"] = disconnected_timeout
    await foreign(amqp_url, declares(LEGACY, arguments=arguments))
    told = " ".join((await broker.inspect(LEGACY)).warnings)
    warning = since_4_3 if version >= (4, 3) else since_4 if version >= (4,) else since_3
    assert warning in told
    assert ("delivery-limit 2000000000" in told) == (warning != "" and limit != 3 and "-1 times" not in warning)
    waits = version >= (4, 3) and disconnected_timeout is None
    assert ("consumer-disconnected-timeout 500" in told) == waits
    assert bool(told) == bool(warning or waits)


async def test_looking_counts_messages_and_consumers_and_changes_nothing(
    broker: RabbitBroker, amqp_url: str, kind: str
) -> None:
    def look(channel: BlockingChannel) -> None:
        channel.queue_declare(LEGACY, durable=True, arguments=KINDS[kind])
        channel.confirm_delivery()
        for _ in range(3):
            channel.basic_publish("", LEGACY, b"kept")
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(LEGACY, take)
        facts.append(asyncio.run_coroutine_threadsafe(broker.inspect(LEGACY), loop).result(20))

    facts: list[Any] = []
    loop = asyncio.get_running_loop()
    await foreign(amqp_url, look)
    assert (facts[0].kind, facts[0].consumers) == (kind, 1)
    listener = Recorder()  # messages of the other consumer come back a little after it has gone
    await broker.consume(LEGACY, adopted(), 10, listener)
    await listener.until_count(3)
    assert listener.bodies == [b"kept"] * 3


async def test_a_queue_of_one_connection_only_can_not_be_looked_at(broker: RabbitBroker, amqp_url: str) -> None:
    def look(channel: BlockingChannel) -> None:
        channel.queue_declare(LEGACY, exclusive=True)
        with pytest.raises(Conflict, match="exclusive"):
            asyncio.run_coroutine_threadsafe(broker.inspect(LEGACY), loop).result(20)

    loop = asyncio.get_running_loop()
    await foreign(amqp_url, look)


async def test_a_stream_can_not_be_consumed(broker: RabbitBroker, amqp_url: str) -> None:
    await foreign(amqp_url, declares(LEGACY, arguments={"x-queue-type": "stream"}))
    with pytest.raises(Conflict, match="stream"):
        await broker.consume(LEGACY, adopted(), 10, Recorder())


# ---------------------------------------------------------------- consuming


async def test_a_classic_queue_is_kept_from_others_while_popgate_consumes_it(
    broker: RabbitBroker, amqp_url: str
) -> None:
    await foreign(amqp_url, declares(LEGACY))
    channel = await broker.consume(LEGACY, adopted(), 10, Recorder())

    def consume(channel: BlockingChannel) -> None:
        channel.basic_consume(LEGACY, take)

    with pytest.raises(ChannelClosedByBroker, match="exclusive use"):
        await foreign(amqp_url, consume)
    await channel.close()
    await foreign(amqp_url, consume)


async def test_a_queue_that_somebody_consumes_is_refused(broker: RabbitBroker, amqp_url: str) -> None:
    def hold(channel: BlockingChannel) -> None:
        channel.queue_declare(LEGACY, durable=True)
        channel.basic_consume(LEGACY, take)
        with pytest.raises(Conflict, match="exclusive use"):
            asyncio.run_coroutine_threadsafe(broker.consume(LEGACY, adopted(), 10, Recorder()), loop).result(20)

    loop = asyncio.get_running_loop()
    await foreign(amqp_url, hold)


async def test_a_classic_queue_with_a_single_active_consumer_is_consumed_too(
    broker: RabbitBroker, amqp_url: str
) -> None:
    await foreign(amqp_url, declares(LEGACY, arguments={"x-single-active-consumer": True}))
    await foreign(amqp_url, publishes(b"one"))
    listener = Recorder()
    await broker.consume(LEGACY, adopted(), 10, listener)
    await listener.until_count(1)


async def test_a_queue_that_is_deleted_and_made_of_another_kind_is_looked_at_again(
    broker: RabbitBroker, amqp_url: str
) -> None:
    await foreign(amqp_url, declares(LEGACY))
    listener = Recorder()
    await broker.consume(LEGACY, adopted(), 10, listener)
    await foreign(amqp_url, lambda channel: channel.queue_delete(LEGACY))
    assert (await listener.until_lost())[1]
    with pytest.raises(QueueGone):
        await broker.consume(LEGACY, adopted(), 10, Recorder())
    await foreign(amqp_url, declares(LEGACY, arguments=KINDS["quorum"]))
    await broker.consume(LEGACY, adopted(), 10, Recorder())
    assert (await broker.inspect(LEGACY)).kind == "quorum"


async def test_deleting_an_adopting_group_leaves_the_queue_alone(broker: RabbitBroker, amqp_url: str) -> None:
    await foreign(amqp_url, declares(LEGACY))
    await broker.declare_group(adopted())
    dead = adopted().dead
    assert [depth.ready for depth in await broker.depth([LEGACY, dead])] == [0, 0]
    await broker.delete_group(adopted())
    assert [depth.ready for depth in await broker.depth([LEGACY, dead])] == [0, None]


# ---------------------------------------------------------------- messages of others


async def test_messages_of_every_shape_arrive(broker: RabbitBroker, amqp_url: str, kind: str) -> None:
    await foreign(amqp_url, declares(LEGACY, arguments=KINDS[kind]))
    plain = {"text": "größe", "yes": True, "no": False, "small": -5, "large": 2**40, "nothing": None}
    headers: dict[str, Any] = {
        **plain,
        "bytes": b"\xff\xfe",
        "decimal": Decimal("-12.34"),
        "moment": datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
        "list": [1, "two", {"three": [3, None]}],
        "table": {"nested": {"deep": True}},
        "x-delivery-count": 7,
    }
    properties = pika.BasicProperties(
        content_type="application/json",
        content_encoding="gzip",
        headers=headers,
        priority=5,  # no version delivers it after a message without one
        correlation_id="c-1",
        reply_to="answers",
        expiration="3600000",
        timestamp=1_700_000_000,
        type="order.created",
        user_id="guest",
        app_id="shop",
    )
    await foreign(amqp_url, publishes(b"\x00\xffbinary", properties=properties))
    await foreign(amqp_url, publishes(b""))
    listener = Recorder()
    await broker.consume(LEGACY, adopted(), 10, listener)
    full, bare = await listener.until_count(2)
    assert not full.identified
    assert (full.message.copy_id, full.message.message_id) == ("", "")
    assert full.earlier_deliveries == 0
    assert full.message.body == b"\x00\xffbinary"
    assert full.message.published_at == 1_700_000_000
    assert full.message.headers == {
        **plain,
        "bytes": "//4=",
        "decimal": "-12.34",
        "moment": "2024-02-29T12:30:00+00:00",
        "list": [1, "two", {"three": [3, None]}],
        "table": {"nested": {"deep": True}},
        "amqp-content-type": "application/json",
        "amqp-content-encoding": "gzip",
        "amqp-priority": 5,
        "amqp-correlation-id": "c-1",
        "amqp-reply-to": "answers",
        "amqp-expiration": "3600000",
        "amqp-type": "order.created",
        "amqp-user-id": "guest",
        "amqp-app-id": "shop",
    }
    json.dumps(full.message.headers)
    assert (bare.message.body, bare.message.headers, bare.message.published_at) == (b"", {}, 0.0)


async def test_a_declared_unique_message_id_names_the_copy(broker: RabbitBroker, amqp_url: str) -> None:
    await foreign(amqp_url, declares(LEGACY))
    for message_id in ("order-1", "~odd", None):
        await foreign(amqp_url, publishes(b"", properties=pika.BasicProperties(message_id=message_id)))
    listener = Recorder()
    await broker.consume(LEGACY, adopted(unique_message_ids=True), 10, listener)
    deliveries = await listener.until_count(3)
    assert [delivery.identified for delivery in deliveries] == [True, True, False]
    assert [delivery.message.message_id for delivery in deliveries] == ["order-1", "~odd", ""]
    assert [delivery.message.copy_id for delivery in deliveries] == ["order-1", "%7Eodd", ""]


async def test_returns_are_counted_as_far_as_rabbitmq_knows(broker: RabbitBroker, amqp_url: str, kind: str) -> None:
    await foreign(amqp_url, declares(LEGACY, arguments=KINDS[kind]))
    await foreign(
        amqp_url,
        publishes(b"", properties=pika.BasicProperties(headers={"x-delivery-count": 9, "x-acquired-count": 9})),
    )
    listener = Recorder()
    channel = await broker.consume(LEGACY, adopted(), 10, listener)
    for count in range(3):
        await listener.until_count(count + 1)
        channel.requeue(listener.tags[-1:])
    await listener.until_count(4)
    # A classic queue only says that there was an earlier delivery, maybe into a buffer; the header is the publisher's.
    known = [delivery.earlier_deliveries for delivery in listener.deliveries]
    assert known == ([0, 1, 2, 3] if kind == "quorum" else [0, 0, 0, 0])


async def test_the_exchange_and_routing_key_of_others_are_told(broker: RabbitBroker, amqp_url: str) -> None:
    def bind_and_publish(channel: BlockingChannel) -> None:
        channel.queue_declare(LEGACY, durable=True)
        channel.queue_bind(LEGACY, "amq.topic", "order.#")
        channel.basic_publish("amq.topic", "order.created.eu", b"routed")

    await foreign(amqp_url, bind_and_publish)
    listener = Recorder()
    await broker.consume(LEGACY, adopted(), 10, listener)
    (delivery,) = await listener.until_count(1)
    assert delivery.message.headers == {"amqp-exchange": "amq.topic", "amqp-routing-key": "order.created.eu"}


async def test_what_a_foreign_message_carries_survives_its_way_to_the_dead_letters(
    broker: RabbitBroker, amqp_url: str
) -> None:
    await foreign(amqp_url, declares(LEGACY))
    properties = pika.BasicProperties(content_type="text/plain", correlation_id="c", priority=4, user_id="guest")
    await foreign(amqp_url, publishes(b"poison", properties=properties))
    listener = Recorder()
    await broker.consume(LEGACY, adopted(), 10, listener)
    (delivery,) = await listener.until_count(1)
    await broker.declare_group(adopted())
    dead = message(delivery.message.body, headers=delivery.message.headers)
    await broker.publish([Outgoing(message=dead, queue=adopted().dead)])
    read: list[Any] = []

    def consume_one(channel: BlockingChannel) -> None:
        read.append(next(channel.consume(adopted().dead, inactivity_timeout=WAIT_SECONDS)))

    await foreign(amqp_url, consume_one)
    _, seen, body = read[0]
    assert (seen.content_type, seen.correlation_id, seen.priority, seen.user_id) == ("text/plain", "c", 4, None)
    assert seen.headers["amqp-user-id"] == "guest"
    assert body == b"poison"


# ---------------------------------------------------------------- what stands in the way


async def test_a_queue_of_the_wrong_kind_under_popgates_own_name_is_a_conflict(
    broker: RabbitBroker, amqp_url: str
) -> None:
    own = layout()
    await broker.declare_topic(TOPIC)
    await foreign(amqp_url, declares(own.queues[0]))
    with pytest.raises(Conflict, match="can't serve"):
        await broker.declare_group(own)


@pytest.mark.parametrize(("limit", "serves_since"), [(1_500_000_000, 3), (-1, 4), (20, 9), (None, 9)])
async def test_a_queue_of_another_version_is_kept_where_it_serves(
    broker: RabbitBroker, amqp_url: str, rabbitmq: RabbitNode, limit: int | None, serves_since: int
) -> None:
    own = layout()
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}
    if limit is not None:
        arguments["x-delivery-limit"] = limit
    await foreign(amqp_url, declares(own.queues[0], arguments=arguments))
    if rabbitmq.release.version >= (serves_since,):
        await declare(broker, own)
    else:
        with pytest.raises(Conflict, match="can't serve"):
            await declare(broker, own)


async def test_the_policy_that_is_named_mends_a_queue_of_an_older_popgate(
    broker: RabbitBroker, amqp_url: str, rabbitmq: RabbitNode, caplog: pytest.LogCaptureFixture
) -> None:
    """With a delivery limit of -1, RabbitMQ 4.0 to 4.2 put returned messages at the end of the queue."""
    version = rabbitmq.release.version
    if version < (4,):
        pytest.skip("there popgate declared another limit")
    own = layout()
    arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True, "x-delivery-limit": -1}
    await foreign(amqp_url, declares(own.queues[0], arguments=arguments))
    await declare(broker, own)
    problems = [record.__dict__["problem"] for record in caplog.records if "problem" in record.__dict__]
    assert any("delivery-limit 2000000000" in problem for problem in problems) == (version < (4, 3))

    async def order_after_a_return() -> list[bytes]:
        await publish(broker, numbered(1, 3))
        listener = Recorder()
        channel = await broker.consume(own.queues[0], own, 1, listener)
        await listener.until_count(1)
        channel.requeue(listener.tags)
        for count in (2, 3, 4):
            await listener.until_count(count)
            channel.ack(listener.tags[-1:])
        await channel.flush()
        await channel.close()
        await broker.let_go(own.queues[0])
        return listener.bodies[1:]

    at_the_end = numbered(2, 3) + numbered(1, 1)
    assert await order_after_a_return() == (at_the_end if version < (4, 3) else numbered(1, 3))
    policy = {"pattern": "^popgate:", "definition": {"delivery-limit": 2_000_000_000}, "apply-to": "queues"}
    vhost = amqp_url.rpartition("/")[2]
    await asyncio.to_thread(rabbitmq.api, "PUT", "policies", vhost, "popgate", body=policy)
    assert await order_after_a_return() == numbered(1, 3)


async def test_an_exchange_of_another_type_is_a_conflict(broker: RabbitBroker, amqp_url: str) -> None:
    await foreign(amqp_url, lambda channel: channel.exchange_declare(f"popgate:{TOPIC}", "fanout", durable=True))
    with pytest.raises(Conflict, match="fanout"):
        await broker.declare_topic(TOPIC)
