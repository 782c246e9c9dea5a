"""One program, or a few in this process, that consume a group directly from a real RabbitMQ."""

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from contract.brokers import rabbit_broker
from contract.recorder import WAIT_SECONDS, Recorder
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.names import GroupName, Subscription, TopicName, own_layout
from popgate_client import Conflict, GroupNotFound, Message, Reject, RequestInvalid, Retry, TopicNotFound, Unauthorized
from popgate_client.amqp import AmqpConsumer, balancing, place, presence
from support import audit_client
from support.amqp_apps import declare_group
from support.rabbitmq import RabbitNode

TOPIC, GROUP = "orders", "billing"
QUEUE = f"popgate:{TOPIC}:{GROUP}:0"
DEAD = f"popgate:{TOPIC}:{GROUP}:dead"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of members, because nothing here is slow."""
    monkeypatch.setattr(presence, "GATHER_SECONDS", 0.1)
    monkeypatch.setattr(balancing, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(balancing, "ASIDE_SECONDS", 0.5)
    monkeypatch.setattr(place, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(balancing, "_SOON_SECONDS", {"presence": 0.2, "management": 0.2})


@pytest.fixture
def channel(amqp_url: str) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        yield connection.channel()


@pytest.fixture
def queues(amqp_url: str) -> list[str]:
    return declare_group(amqp_url, TOPIC, GROUP, 3)


def publish(channel: BlockingChannel, *bodies: str, queue: str = QUEUE) -> None:
    for body in bodies:
        channel.basic_publish("", queue, body.encode(), pika.BasicProperties(delivery_mode=2))


def depth(channel: BlockingChannel, queue: str = QUEUE) -> int:
    return channel.queue_declare(queue, passive=True).method.message_count


@asynccontextmanager
async def running(consumer: AmqpConsumer) -> AsyncGenerator[asyncio.Task[None]]:
    run = asyncio.create_task(consumer.run_async())
    try:
        yield run
    finally:
        consumer.stop()
        await asyncio.wait([run])
    await run


async def until(condition: Callable[[], bool], what: str) -> None:
    await audit_client.until(condition, timeout_seconds=WAIT_SECONDS, what=what)


def all_active(consumer: AmqpConsumer, count: int) -> bool:
    return [*consumer.state().queues.values()].count("active") == count


# ---------------------------------------------------------------- handling


async def test_what_is_handled_is_acked_in_the_order_of_the_queue(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    handled: list[Message] = []
    publish(channel, *map(str, range(50)))
    async with running(AmqpConsumer(TOPIC, GROUP, handled.append, amqp_url=amqp_url)) as _:
        await until(lambda: len(handled) == 50, "all to be handled")
    assert [message.text for message in handled] == [*map(str, range(50))]
    assert {(message.topic, message.group, message.queue) for message in handled} == {(TOPIC, GROUP, 0)}
    assert depth(channel) == 0


async def test_a_failed_message_is_tried_again_before_those_behind_it(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    seen: list[tuple[str, int]] = []

    async def handle(message: Message) -> None:
        seen.append((message.text, message.delivery_count))
        if message.text == "b" and message.delivery_count == 1:
            raise ValueError("on purpose")
        if message.text == "b" and message.delivery_count == 2:
            raise Retry(0.05)

    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, retry_initial_seconds=0.05)
    publish(channel, "a", "b", "c")
    async with running(consumer):
        await until(lambda: len(seen) == 5, "all to be handled")
    assert seen == [("a", 1), ("b", 1), ("b", 2), ("b", 3), ("c", 1)]
    assert (consumer.counters.handled, consumer.counters.failed, consumer.counters.acked) == (3, 1, 3)


async def test_what_is_rejected_or_fails_too_often_is_a_dead_letter_and_the_rest_goes_on(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    handled: list[str] = []

    def handle(message: Message) -> None:
        if message.text == "bad":
            raise Reject("no order")
        if message.text == "hopeless":
            raise ValueError("on purpose")
        handled.append(message.text)

    publish(channel, "bad", "hopeless", "good")
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, max_deliveries=2, retry_initial_seconds=0.05)
    async with running(consumer):
        await until(lambda: handled == ["good"], "the good one")
    letters = [channel.basic_get(DEAD, auto_ack=True) for _ in range(2)]
    assert [body for _, _, body in letters] == [b"bad", b"hopeless"]
    notes = [properties.headers or {} for _, properties, _ in letters if properties is not None]
    assert [note["x-popgate-dead-cause"] for note in notes] == ["rejected", "max_deliveries"]
    assert [note["x-popgate-dead-reason"] for note in notes] == ["no order", "max_deliveries"]
    assert [note["x-popgate-delivery-count"] for note in notes] == [1, 2]
    assert depth(channel) == 0


async def test_without_order_several_messages_of_a_queue_are_handled_at_once_and_no_more_than_asked_for(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    at_once = most = done = 0

    async def handle(_: Message) -> None:
        nonlocal at_once, most, done
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        done += 1

    for queue in queues:
        publish(channel, *map(str, range(8)), queue=queue)
    async with running(AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, keep_order=False, concurrency=4)):
        await until(lambda: done == 24, "all to be handled")
    assert most == 4


async def test_a_stop_lets_the_handler_finish_and_the_rest_goes_to_the_next_one_in_order(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    first: list[str] = []
    rest: list[str] = []

    def handle(message: Message) -> None:
        begun.set()
        may_end.wait(20)
        first.append(message.text)

    publish(channel, *map(str, range(10)))
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url)
    async with running(consumer) as run:
        await until(begun.is_set, "the first message")
        consumer.stop()
        await asyncio.sleep(0.2)
        assert not run.done()
        may_end.set()
    async with running(AmqpConsumer(TOPIC, GROUP, lambda message: rest.append(message.text), amqp_url=amqp_url)):
        await until(lambda: len(rest) == 9, "the rest")
    assert first + rest == [*map(str, range(10))]


async def test_a_stop_waits_no_longer_than_it_was_told_for_a_handler_that_hangs(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def handle(_: Message) -> None:
        begun.set()
        may_end.wait(WAIT_SECONDS)

    publish(channel, "a", "b")
    async with running(AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, drain_seconds=0.1)):
        await until(begun.is_set, "the first message")
    assert not may_end.is_set()
    await until(lambda: depth(channel) == 2, "both to come back")
    may_end.set()


async def test_a_lost_connection_is_told_to_the_handler_and_then_all_goes_on(
    amqp_url: str, queues: list[str], channel: BlockingChannel, rabbitmq: RabbitNode
) -> None:
    begun: list[Message] = []
    texts: list[str] = []

    async def handle(message: Message) -> None:
        begun.append(message)
        if len(begun) == 1:
            await until(lambda: bool(message.lease_lost), "the loss to be told")
        texts.append(message.text)

    publish(channel, "a", "b")
    consumer = AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url)
    vhost = amqp_url.rpartition("/")[2]
    async with running(consumer):
        await until(lambda: bool(begun), "the first message")
        channel.connection.close()
        await asyncio.to_thread(rabbitmq.close_connections, vhost)
        await until(lambda: consumer.counters.acked == 2, "both to be acked")
    assert sorted(texts) == ["a", "a", "b"]
    assert consumer.counters.leases_lost == 1


# ---------------------------------------------------------------- what can't be consumed


async def refusal(amqp_url: str, topic: str = TOPIC, group: str = GROUP, queues: list[str] | None = None) -> str:
    consumer = AmqpConsumer(topic, group, lambda _: None, amqp_url=amqp_url, queues=queues)
    with pytest.raises((RequestInvalid, Unauthorized)) as raised:
        await asyncio.wait_for(consumer.run_async(), 10)
    return f"{type(raised.value).__name__}: {raised.value.detail}"


async def test_a_topic_or_a_group_that_popgate_has_not_made_is_named(amqp_url: str, queues: list[str]) -> None:
    assert (await refusal(amqp_url, topic="nothing")).startswith(
        f"{TopicNotFound.__name__}: popgate has not created topic"
    )
    assert (await refusal(amqp_url, group="nobody")).startswith(
        f"{GroupNotFound.__name__}: popgate has not created group"
    )
    assert "there is no queue 'gone'" in await refusal(amqp_url, queues=["gone"])


async def test_adopted_queues_are_asked_for_by_name_and_those_without_a_single_active_consumer_refused_with_the_remedy(
    amqp_url: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("popgate:legacy:default:dead", durable=True)
    for kind in ("classic", "quorum"):
        channel.queue_declare(f"plain-{kind}", durable=True, arguments={"x-queue-type": kind})
        said = await refusal(amqp_url, "legacy", "default", [f"plain-{kind}"])
        assert said.startswith(f"{Conflict.__name__}: queue 'plain-{kind}' has no single active consumer")
        assert "x-single-active-consumer" in said
    assert "queues=[...]" in await refusal(amqp_url, "legacy", "default")


async def test_wrong_credentials_are_refused_at_once(amqp_url: str) -> None:
    assert "Unauthorized" in await refusal(amqp_url.replace("guest:guest", "guest:wrong"))


@pytest.mark.parametrize("url", ["http://localhost", "localhost:5672", "amqp://"])
def test_an_address_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(RequestInvalid, match="amqp"):
        AmqpConsumer(TOPIC, GROUP, lambda _: None, amqp_url=url)


# ---------------------------------------------------------------- several


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_adopted_queues_with_a_single_active_consumer_are_shared(
    amqp_url: str, channel: BlockingChannel, kind: str
) -> None:
    names = [f"legacy-{number}" for number in range(4)]
    arguments = {"x-queue-type": kind, "x-single-active-consumer": True, "x-max-length": 1_000}
    for name in names:
        channel.queue_declare(name, durable=True, arguments=arguments)
    handled: list[tuple[int, str]] = []

    def make(number: int) -> AmqpConsumer:
        def handle(message: Message) -> None:
            handled.append((number, message.text))

        return AmqpConsumer("legacy", "default", handle, amqp_url=amqp_url, queues=names, client_id=f"c{number}")

    one, two = make(1), make(2)
    async with running(one):
        await until(lambda: all_active(one, 4), "the first one to have all")
        async with running(two):
            await until(lambda: all_active(one, 2) and all_active(two, 2), "each to have two")
            for name in names:
                publish(channel, name, queue=name)
            await until(lambda: len(handled) == 4, "all to be handled")
        await until(lambda: all_active(one, 4), "the first one to have all again")
    assert sorted(number for number, _ in handled) == [1, 1, 2, 2]
    assert one.state().released_count == 2


async def test_where_the_management_interface_is_closed_programs_tell_each_other(
    amqp_url: str, queues: list[str], rabbitmq: RabbitNode
) -> None:
    user = f"user-{secrets.token_hex(4)}"
    rabbitmq.api("PUT", "users", user, body={"password": "secret", "tags": ""})
    url = f"http://{user}:secret@127.0.0.1:{rabbitmq.management_port}"
    consumer = AmqpConsumer(TOPIC, GROUP, lambda _: None, amqp_url=amqp_url, management_url=url)
    async with running(consumer):
        await until(lambda: all_active(consumer, 3), "all queues")
        assert consumer.state().learns_from == "presence"
        assert consumer.state().members == (consumer.state().client_id,)
    rabbitmq.api("DELETE", "users", user)


async def test_what_a_proxy_consumes_is_left_to_it_and_taken_when_it_lets_go_and_a_proxy_waits_for_programs(
    amqp_url: str, channel: BlockingChannel
) -> None:
    layout = own_layout(Subscription(TopicName(TOPIC), GroupName(GROUP)), 1)
    handled: list[str] = []
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as proxy:
        await proxy.declare_topic(layout.subscription.topic)
        await proxy.declare_group(layout)
        consumer = AmqpConsumer(TOPIC, GROUP, lambda message: handled.append(message.text), amqp_url=amqp_url)
        theirs = Recorder()
        held = await proxy.consume(layout.queues[0], layout, 1, theirs)
        publish(channel, "a", "b", "c")
        await theirs.until_count(1)
        await held.resize(0)  # RabbitMQ has no consumer of the proxy any more, and it still has "a" leased
        async with running(consumer):
            await until(lambda: bool(consumer.state().problems), "the program to say what it is")
            assert "a popgate proxy consumes the queue" in consumer.state().problems[QUEUE]
            assert not handled
            await held.close()
            await proxy.let_go(layout.queues[0])
            await until(lambda: sorted(handled) == ["a", "b", "c"], "all to be handled")
            await until(lambda: not consumer.state().problems, "the program to say that all is well")
            waiting = asyncio.create_task(proxy.consume(layout.queues[0], layout, 1, theirs))
            await asyncio.sleep(0.3)
            assert not waiting.done()
        await (await waiting).close()


async def test_a_program_whose_presence_was_deleted_tells_of_itself_again(
    monkeypatch: pytest.MonkeyPatch, amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    monkeypatch.setattr(balancing, "TELL_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(presence, "SILENT_SECONDS", 1.0)
    one, two = (AmqpConsumer(TOPIC, GROUP, lambda _: None, amqp_url=amqp_url, client_id=name) for name in ("a", "b"))
    async with running(one):
        await until(lambda: all_active(one, 3), "the first one to have all")
        channel.exchange_delete(f"popgate:presence:{TOPIC}:{GROUP}")
        async with running(two):
            await until(lambda: all_active(one, 2) and all_active(two, 1), "both to share the queues")


async def test_a_cancelled_run_cancels_its_handlers(amqp_url: str, queues: list[str], channel: BlockingChannel) -> None:
    ends: list[str] = []

    async def handle(message: Message) -> None:
        ends.append("begun")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    publish(channel, "a")
    run = asyncio.create_task(AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url).run_async())
    await until(lambda: ends == ["begun"], "the handler to begin")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: ends == ["begun", "cancelled"], "the handler to be cancelled")
    await until(lambda: depth(channel) == 1, "the message to come back")


async def test_a_queue_that_goes_to_another_program_under_load_keeps_its_order_and_nothing_is_handled_twice(
    amqp_url: str, queues: list[str], channel: BlockingChannel
) -> None:
    handled: list[tuple[int, int, int, str]] = []

    def make(number: int) -> AmqpConsumer:
        async def handle(message: Message) -> None:
            await asyncio.sleep(0.02)
            handled.append((message.queue, int(message.text), message.delivery_count, f"c{number}"))

        return AmqpConsumer(TOPIC, GROUP, handle, amqp_url=amqp_url, client_id=f"c{number}")

    for queue in queues:
        publish(channel, *map(str, range(150)), queue=queue)
    one, two = make(1), make(2)
    async with running(one):
        await until(lambda: all_active(one, 3), "the first one to have all")
        async with running(two):
            await until(lambda: len(handled) == 450, "all to be handled")
    for queue_index in range(3):
        assert [number for index, number, _, _ in handled if index == queue_index] == [*range(150)]
    assert {who for _, _, _, who in handled} == {"c1", "c2"}


async def test_programs_that_learn_of_each_other_in_different_ways_share_the_queues(
    amqp_url: str, queues: list[str], rabbitmq: RabbitNode
) -> None:
    url = f"http://guest:guest@127.0.0.1:{rabbitmq.management_port}"
    one = AmqpConsumer(TOPIC, GROUP, lambda _: None, amqp_url=amqp_url, management_url=url)
    two = AmqpConsumer(TOPIC, GROUP, lambda _: None, amqp_url=amqp_url)
    async with running(one):
        await until(lambda: all_active(one, 3), "the first one to have all")
        async with running(two):
            await until(lambda: all_active(one, 2) and all_active(two, 1), "both to share the queues")
            assert (one.state().learns_from, two.state().learns_from) == ("management", "presence")
            await until(  # the management interface shows new members a second later
                lambda: set(one.state().members) == set(two.state().members), "both to know the same members"
            )
        await until(lambda: all_active(one, 3), "the first one to have all again")
