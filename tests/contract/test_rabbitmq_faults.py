"""Faults of RabbitMQ and its operators under a living popgate: connections cut, nodes killed, queues gone, alarms."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from yarl import URL

from contract.brokers import rabbit_broker
from contract.conftest import CONSUMER_TIMEOUT_SECONDS
from contract.recorder import TOPIC, WAIT_SECONDS, Recorder, declare, layout, message, numbered, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import Session
from popgate.domain.errors import BrokerUnavailable, QueueGone
from popgate.domain.names import BrokerQueue, GroupName
from popgate.engine.queue.prefetch_window import PREFETCH_MAX
from popgate.ports.broker import Channel, Listener, Outgoing, PublishStatus
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions

BILLING = layout("billing")
QUEUE = BILLING.queues[0]


@pytest.fixture
async def broker(amqp_url: str) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as rabbit:
        await declare(rabbit, BILLING)
        yield rabbit


@pytest.fixture
async def fragile_broker(fragile_node: RabbitNode) -> AsyncIterator[RabbitBroker]:
    fragile_node.start()
    fragile_node.add_vhost("fragile")
    options = RabbitOptions(
        amqp_urls=(fragile_node.amqp_url("fragile"),),
        heartbeat_seconds=1,
        asked_timeout_seconds=CONSUMER_TIMEOUT_SECONDS,  # if RabbitMQ lets the consumer choose, it is as short
    )
    async with rabbit_broker(options) as rabbit:
        await declare(rabbit, BILLING)
        yield rabbit
    fragile_node.resume()
    fragile_node.start()
    fragile_node.delete_vhost("fragile")


async def available(broker: RabbitBroker, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Return when the broker can be used again."""
    async with asyncio.timeout(wait_seconds):
        while broker.unavailable_reason() is not None:  # noqa: ASYNC110 - the port has no event for it
            await asyncio.sleep(0.02)


async def consume_when_possible(broker: RabbitBroker, listener: Listener, prefetch: int = 1000) -> Channel:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(BrokerUnavailable):
                return await broker.consume(QUEUE, BILLING, prefetch, listener)
            await asyncio.sleep(0.05)


async def all_arrive(broker: RabbitBroker, bodies: set[bytes]) -> None:
    """Consume and settle until every body has arrived.

    In rounds: their number depends on the time that the fault takes, and one channel can't hold all messages.
    """
    missing = set(bodies)
    while missing:
        listener = Recorder()
        channel = await consume_when_possible(broker, listener, PREFETCH_MAX)
        await listener.until_count(min(len(missing), PREFETCH_MAX))
        missing.difference_update(listener.bodies)
        channel.ack(listener.tags)
        await channel.flush()
        await channel.close()


async def close_connections(node: RabbitNode, amqp_url: str) -> None:
    """Close popgate's two connections from the broker's side."""
    await asyncio.to_thread(node.close_connections, amqp_url.rpartition("/")[2])


class SteadyPublisher:
    """Publishes numbers in batches until stopped, through any fault, and records which were certainly stored."""

    def __init__(self, broker: RabbitBroker) -> None:
        self._broker = broker
        self._next = 0
        self.stored: set[bytes] = set()
        self.refusals = 0
        self.unknown = 0
        self._stopping = False

    async def run(self) -> None:
        while not self._stopping:
            bodies = numbered(self._next, self._next + 31)
            self._next += 32
            try:
                outcomes = await self._broker.publish([Outgoing(message=message(body), topic=TOPIC) for body in bodies])
            except BrokerUnavailable:
                self.refusals += 1
                await asyncio.sleep(0.02)
                continue
            for body, outcome in zip(bodies, outcomes, strict=True):
                assert outcome.status is not PublishStatus.UNROUTED
                if outcome.status is PublishStatus.PUBLISHED:
                    self.stored.add(body)
                else:
                    self.unknown += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - it changes with every batch
                await asyncio.sleep(0.01)

    def has_stored(self, count: int) -> bool:
        return len(self.stored) >= count

    def stop(self) -> None:
        self._stopping = True


# ---------------------------------------------------------------- connections and channels


async def test_a_queue_that_is_being_declared_can_be_consumed_meanwhile(broker: RabbitBroker) -> None:
    """RabbitMQ ends the whole connection if a consumer meets a quorum queue before that runs."""
    witness, other = Recorder(), layout("other")
    await broker.consume(QUEUE, BILLING, 10, witness)
    for _ in range(8):
        listener = Recorder()
        declaring = asyncio.create_task(declare(broker, other))
        channel: Channel | None = None
        while channel is None:
            with contextlib.suppress(QueueGone):
                channel = await broker.consume(other.queues[0], other, 10, listener)
        await declaring
        await channel.close()
        await broker.delete_group(other)
        assert (witness.ends, listener.ends) == ([], [])


async def test_a_cut_connection_ends_its_channels_once_and_is_replaced(
    broker: RabbitBroker, rabbitmq: RabbitNode, amqp_url: str
) -> None:
    await publish(broker, numbered(1, 20))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(10)
    channel.ack(listener.tags[:4])
    await channel.backlog()
    await close_connections(rabbitmq, amqp_url)
    reason, queue_gone = await listener.until_lost()
    assert not queue_gone
    assert "CONNECTION_FORCED" in reason
    again = Recorder()
    second = await consume_when_possible(broker, again)
    # Tags start at 1 again: those of the old channel must not settle anything here.
    channel.ack(listener.tags)
    channel.requeue(listener.tags)
    await channel.flush()
    await channel.resize(5)
    await channel.close()
    await again.until_count(16)
    assert again.bodies == numbered(5, 20)
    second.ack(again.tags)
    assert await second.backlog() == 0
    assert len(listener.ends) == 1
    assert again.ends == []
    await available(broker)


async def test_a_session_knows_the_version_of_its_node_after_its_end(amqp_url: str, rabbitmq: RabbitNode) -> None:
    options = RabbitOptions(amqp_urls=(amqp_url,))
    session = await Session.connect(options, URL(amqp_url), "test", connect_seconds=WAIT_SECONDS)
    await close_connections(rabbitmq, amqp_url)
    await session.lost.wait()
    await session.close()
    assert session.server_version[:2] == rabbitmq.release.version[:2]


async def test_what_is_published_while_connections_are_cut_is_stored_or_not_claimed(
    broker: RabbitBroker, rabbitmq: RabbitNode, amqp_url: str
) -> None:
    publisher = SteadyPublisher(broker)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(publisher.run())
        for _ in range(3):
            wanted = len(publisher.stored) + 500
            await publisher.until(partial(publisher.has_stored, wanted))
            await close_connections(rabbitmq, amqp_url)
        publisher.stop()
    assert publisher.refusals + publisher.unknown > 0
    await available(broker)
    await all_arrive(broker, publisher.stored)


async def test_a_delivery_that_is_held_too_long_costs_its_channel_and_no_other(
    fragile_broker: RabbitBroker, fragile_node: RabbitNode
) -> None:
    other = layout("shipping")
    await declare(fragile_broker, other)
    await publish(fragile_broker, numbered(1, 3))
    listener, other_listener = Recorder(), Recorder()
    channel = await fragile_broker.consume(QUEUE, BILLING, 10, listener)
    other_channel = await fragile_broker.consume(other.queues[0], other, 10, other_listener)
    await other_listener.until_count(3)
    other_channel.ack(other_listener.tags)
    reason, queue_gone = await listener.until_lost()
    assert ("ended the consumption" if fragile_node.release.version >= (4, 3) else "timed out") in reason
    assert not queue_gone
    channel.ack(listener.tags)
    await channel.flush()
    again = Recorder()
    second = await fragile_broker.consume(QUEUE, BILLING, 10, again)
    await again.until_count(3)
    second.ack(again.tags)
    assert [delivery.earlier_deliveries for delivery in again.deliveries] == [1, 1, 1]
    assert await other_channel.backlog() == 0
    assert other_listener.ends == []


async def test_an_ack_that_comes_after_the_timeout_is_not_taken_for_one_that_counted(
    fragile_broker: RabbitBroker,
) -> None:
    """RabbitMQ 4.3 ignores it without an error: the messages are back in the queue by then."""
    await publish(fragile_broker, numbered(1, 7))
    listener = Recorder()
    channel = await fragile_broker.consume(QUEUE, BILLING, 2, listener)
    await listener.until_count(2)
    time.sleep(CONSUMER_TIMEOUT_SECONDS + 1)  # noqa: ASYNC251 - the whole process stands still, and hears of nothing
    channel.ack(listener.tags[:2])
    await channel.flush()
    _, queue_gone = await listener.until_lost()
    assert not queue_gone
    assert channel.settled_evidence() == 0
    await available(fragile_broker)  # so long without a heartbeat, it may have lost its whole connection, too
    again = Recorder()
    await fragile_broker.consume(QUEUE, BILLING, 10, again)
    await again.until_count(7)
    assert again.bodies == numbered(1, 7)


async def test_a_killed_node_is_survived_without_loss(fragile_broker: RabbitBroker, fragile_node: RabbitNode) -> None:
    listener = Recorder()
    await fragile_broker.consume(QUEUE, BILLING, 10, listener)
    publisher = SteadyPublisher(fragile_broker)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publisher.run())
        await publisher.until(lambda: len(publisher.stored) > 500)
        await asyncio.to_thread(fragile_node.sync)
        await asyncio.to_thread(fragile_node.kill)
        _, queue_gone = await listener.until_lost()
        assert not queue_gone
        assert "Rabbit" in str(fragile_broker.unavailable_reason())
        with pytest.raises(BrokerUnavailable):
            await fragile_broker.consume(QUEUE, BILLING, 10, Recorder())
        with pytest.raises(BrokerUnavailable):
            await fragile_broker.depth([QUEUE])
        stored = len(publisher.stored)
        await asyncio.to_thread(fragile_node.start)
        await publisher.until(lambda: len(publisher.stored) > stored + 100)
        publisher.stop()
    await all_arrive(fragile_broker, publisher.stored)


async def test_a_node_that_hangs_is_noticed_by_its_missing_heartbeats(
    fragile_broker: RabbitBroker, fragile_node: RabbitNode
) -> None:
    listener = Recorder()
    await fragile_broker.consume(QUEUE, BILLING, 10, listener)
    fragile_node.pause()
    waiting = asyncio.create_task(fragile_broker.depth([QUEUE]), name="depth of a hung node")
    await listener.until_lost()
    with pytest.raises(BrokerUnavailable):
        await waiting
    fragile_node.resume()
    await available(fragile_broker, wait_seconds=60)
    await publish(fragile_broker, [b"after"])


# ---------------------------------------------------------------- alarms


async def test_a_memory_alarm_refuses_publishes_at_once_while_consuming_goes_on(
    broker: RabbitBroker, rabbitmq: RabbitNode
) -> None:
    await publish(broker, numbered(1, 20))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 5, listener)
    publisher = SteadyPublisher(broker)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(publisher.run())
        await publisher.until(lambda: len(publisher.stored) > 100)
        await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1")
        try:
            await publisher.until(lambda: publisher.refusals > 10)
            publisher.stop()
            with pytest.raises(BrokerUnavailable, match="memory") as refused:
                async with asyncio.timeout(1):
                    await broker.publish([Outgoing(message=message(), topic=TOPIC)])
            assert refused.value.retry_after_seconds == 5
            assert broker.unavailable_reason() is None, "pops go on, and are what ends the alarm"
            done = 0
            while done < 20:
                channel.ack(listener.tags[done : done + 5])
                done += 5
                await listener.until_count(done + 5)
            assert listener.bodies[:20] == numbered(1, 20)
        finally:
            await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")
    await available(broker)
    await publish(broker, [b"after the alarm"])
    await channel.close()
    await all_arrive(broker, {*publisher.stored, b"after the alarm"})


# ---------------------------------------------------------------- queues


async def test_a_queue_that_an_operator_deletes_is_gone_until_it_is_declared_again(
    broker: RabbitBroker, rabbitmq: RabbitNode, amqp_url: str
) -> None:
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    await asyncio.to_thread(rabbitmq.api, "DELETE", "queues", amqp_url.rpartition("/")[2], QUEUE)
    assert (await listener.until_lost())[1]
    with pytest.raises(QueueGone):
        await broker.consume(QUEUE, BILLING, 10, Recorder())
    outcomes = await broker.publish([Outgoing(message=message(), topic=TOPIC)])
    assert [outcome.status for outcome in outcomes] == [PublishStatus.UNROUTED]
    await declare(broker, BILLING)
    await publish(broker, [b"again"])
    again = Recorder()
    await broker.consume(QUEUE, BILLING, 10, again)
    await again.until_count(1)


async def test_an_exchange_that_an_operator_deletes_harms_no_other_topic_for_long(
    broker: RabbitBroker, rabbitmq: RabbitNode, amqp_url: str
) -> None:
    await publish(broker, [b"known"])
    await asyncio.to_thread(rabbitmq.api, "DELETE", "exchanges", amqp_url.rpartition("/")[2], f"popgate:{TOPIC}")
    statuses = [
        (await broker.publish([Outgoing(message=message(), topic=TOPIC)]))[0].status,
        (await broker.publish([Outgoing(message=message(), topic=TOPIC)]))[0].status,
        (await broker.publish([Outgoing(message=message(), queue=QUEUE)]))[0].status,
    ]
    assert statuses == [PublishStatus.FAILED, PublishStatus.UNROUTED, PublishStatus.PUBLISHED]


async def test_a_channel_that_refuses_is_replaced_but_not_time_and_again(
    broker: RabbitBroker, rabbitmq: RabbitNode, amqp_url: str
) -> None:
    """A full queue refuses for a long time. Messages for other queues are stored meanwhile, and channels do not pile
    up.
    """
    vhost = amqp_url.rpartition("/")[2]
    full = BrokerQueue("full")
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    declared = {"durable": True, "auto_delete": False, "arguments": arguments}
    await asyncio.to_thread(rabbitmq.api, "PUT", "queues", vhost, full, body=declared)
    statuses: list[PublishStatus] = []
    async with asyncio.TaskGroup() as tasks:
        others = SteadyPublisher(broker)
        tasks.create_task(others.run())
        ends_at = asyncio.get_running_loop().time() + 2.0
        while asyncio.get_running_loop().time() < ends_at:
            statuses.append((await broker.publish([Outgoing(message=message(), queue=full)]))[0].status)
        others.stop()
    assert statuses[0] is PublishStatus.PUBLISHED
    assert set(statuses[2:]) == {PublishStatus.REFUSED}
    assert (others.refusals, others.unknown) == (0, 0)
    async with asyncio.timeout(WAIT_SECONDS):
        while len(numbers := await asyncio.to_thread(confirming, rabbitmq, vhost)) != 1:  # noqa: ASYNC110 - a view
            await asyncio.sleep(0.2)
    assert 3 <= numbers[0] <= 12, "the number of its latest channel tells how many there were"


def confirming(node: RabbitNode, vhost: str) -> list[int]:
    """Return the numbers of the channels on which messages are confirmed."""
    return [one["number"] for one in node.api("GET", "vhosts", vhost, "channels") if one.get("confirm")]


async def test_headers_that_amqp_can_not_carry_fail_alone(broker: RabbitBroker) -> None:
    outgoing = [
        Outgoing(message=message(b"too many"), topic=TOPIC),
        Outgoing(message=message(headers={"large": "x" * 200_000}), topic=TOPIC),
        Outgoing(message=message(headers={"n" * 300: 1}), topic=TOPIC),
        Outgoing(message=message(headers={"huge": 2**70}), topic=TOPIC),
        Outgoing(message=message(message_id="i" * 300), topic=TOPIC),
        Outgoing(message=message(b"as well"), topic=TOPIC),
    ]
    outcomes = await broker.publish(outgoing)
    refused = [outcome.status is PublishStatus.REFUSED for outcome in outcomes]
    assert refused == [False, True, True, True, True, False]
    assert "64 bits" in outcomes[3].detail


async def test_channels_that_come_and_go_never_use_up_their_numbers(broker: RabbitBroker) -> None:
    for number in range(300):
        group = layout(GroupName(f"g{number % 3}"))
        if number < 3:
            await declare(broker, group)
        channels = [await broker.consume(each.queues[0], each, 1, Recorder()) for each in (group, BILLING)]
        await channels[number % 2].close()
        await channels[1 - number % 2].close()
    await publish(broker, [b"still connected"])
