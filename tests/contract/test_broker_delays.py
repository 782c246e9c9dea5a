"""What every broker must do with delayed publishes: never early, at most a second late, and never lost."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

from contract.brokers import embedded_broker, rabbit_broker
from contract.recorder import TOPIC, Recorder, declare, layout, message, publish
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.message import Message
from popgate.domain.names import Layout, TopicName
from popgate.ports.broker import Broker, Delivery, Outgoing, PublishStatus

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq_versions]

BILLING = layout("billing")
SHIPPING = layout("shipping")
QUEUE = BILLING.queues[0]
LATE_SECONDS_MAX = 1.0
"""Maximum seconds late, in addition to the resolution."""
STANDING_BY = 2_000
STANDING_BY_FULL = 100_000
BATCH = 500

Opener: TypeAlias = Callable[[], AbstractAsyncContextManager[Broker]]


@pytest.fixture(params=["embedded", "rabbitmq"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens a broker on the same messages each time."""
    if request.param == "embedded":
        return lambda: embedded_broker(tmp_path)
    options = RabbitOptions(amqp_urls=(request.getfixturevalue("amqp_url"),))
    return lambda: rabbit_broker(options)


class Timed(Recorder):
    """Records the time at which each message came."""

    def __init__(self) -> None:
        super().__init__()
        self.came_at: list[float] = []

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self.came_at += [time.time()] * len(deliveries)
        super().on_deliveries(deliveries)


def delayed(body: bytes, seconds: float, *, topic: TopicName = TOPIC, index: int = 0) -> Outgoing:
    now = time.time()
    stamped = message(body)._replace(published_at=now, visible_at=now + seconds)
    return Outgoing(message=stamped, topic=topic, index=index, delay_seconds=seconds)


async def publish_delayed(broker: Broker, *messages: Outgoing) -> None:
    outcomes = await broker.publish(messages)
    assert [outcome.status for outcome in outcomes] == [PublishStatus.PUBLISHED] * len(messages)


async def listen(broker: Broker, group: Layout, index: int = 0) -> Timed:
    listener = Timed()
    await broker.consume(group.queues[index], group, 5_000, listener)
    return listener


def assert_in_time(broker: Broker, listener: Timed) -> None:
    lateness = [
        came_at - (delivery.message.visible_at or 0.0)
        for came_at, delivery in zip(listener.came_at, listener.deliveries, strict=True)
    ]
    assert min(lateness) >= 0.0, f"{-min(lateness):.4f} s too early"
    assert max(lateness) <= broker.capabilities.delay_resolution_seconds + LATE_SECONDS_MAX


async def test_delays_are_kept_never_early_and_hardly_late(broker: Broker, *, full_run: bool) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    delays = [3, 0.25, 1, *([5, 7, 6, 4] if full_run else []), 2, 1.5]
    await publish_delayed(broker, *[delayed(b"%g" % seconds, seconds) for seconds in delays])
    await publish(broker, [b"at once"])
    await listener.until_count(1)
    assert listener.bodies == [b"at once"]
    listener.deliveries.clear()
    listener.came_at.clear()
    await listener.until_count(len(delays))
    assert_in_time(broker, listener)
    assert sorted(listener.bodies) == sorted(b"%g" % seconds for seconds in delays)


async def test_a_delayed_message_arrives_as_it_was_published(broker: Broker) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    headers = {"tenant": "açaí", "n": 7, "x-death": "mine", "x-first-death-queue": "mine", "CC": "nobody", "none": None}
    now = time.time()
    sent = message(b"\x00\xff", headers=headers, ordering_key="kündin 7", message_id="ïd")._replace(
        published_at=now, visible_at=now + 1, expires_at=now + 30.5
    )
    await publish_delayed(broker, Outgoing(message=sent, topic=TOPIC, delay_seconds=1))
    (delivery,) = await listener.until_count(1)
    assert delivery.message == sent
    assert delivery.identified
    assert delivery.earlier_deliveries == 0


async def test_messages_with_equal_delays_keep_their_order(broker: Broker) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    bodies = [b"%03d" % number for number in range(300)]
    await publish_delayed(broker, *[delayed(body, 1) for body in bodies])
    await listener.until_count(len(bodies))
    assert listener.bodies == bodies
    assert_in_time(broker, listener)


async def test_a_delayed_message_reaches_the_groups_that_exist_when_it_becomes_visible(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish_delayed(broker, delayed(b"later", 2), delayed(b"other queue", 2, index=1))
    await declare(broker, SHIPPING)
    await broker.delete_group(BILLING)
    listener = await listen(broker, SHIPPING)
    await listener.until_count(1)
    assert listener.bodies == [b"later"] or listener.bodies == [b"later", b"other queue"]
    assert [depth.ready for depth in await broker.depth([QUEUE])] == [None]


async def test_the_index_and_the_topic_choose_the_queue_of_a_delayed_message(broker: Broker) -> None:
    dotted = layout("a.b", queue_count=3, topic=TopicName("a.b.0"))
    likewise = layout("a.b", queue_count=3, topic=TopicName("b.0"))
    await declare(broker, dotted, likewise)
    listeners = [await listen(broker, dotted, index) for index in range(3)]
    await publish_delayed(
        broker, *[delayed(b"for %d" % index, 1, topic=TopicName("a.b.0"), index=index) for index in range(3)]
    )
    for index, listener in enumerate(listeners):
        await listener.until_count(1)
        assert listener.bodies == [b"for %d" % index]
    assert [depth.ready for depth in await broker.depth(likewise.queues)] == [0, 0, 0]


async def test_what_no_group_is_there_for_holds_up_nobody(broker: Broker) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    nobody = TopicName("nobody")
    await publish_delayed(broker, *[delayed(b"lost", 1, topic=nobody) for _ in range(200)])
    await publish_delayed(broker, delayed(b"kept", 1))
    await listener.until_count(1)
    assert_in_time(broker, listener)
    await declare(broker, layout("late", topic=nobody))
    assert (await broker.depth([layout("late", topic=nobody).queues[0]]))[0].ready == 0


async def test_delayed_messages_outlive_a_restart(opener: Opener) -> None:
    async with opener() as broker:
        await declare(broker, BILLING)
        await publish_delayed(broker, delayed(b"due meanwhile", 1), delayed(b"due later", 3))
        closed_at = time.time()
    await asyncio.sleep(1.5)
    async with opener() as broker:
        listener = await listen(broker, BILLING)
        await listener.until_count(2)
        assert listener.bodies == [b"due meanwhile", b"due later"]
        assert listener.came_at[1] >= closed_at + 2.5
        listener.came_at[0] = listener.deliveries[0].message.visible_at or 0.0
        assert_in_time(broker, listener)


async def test_many_that_wait_do_not_hold_up_the_others(broker: Broker, *, full_run: bool) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    for _ in range(0, STANDING_BY_FULL if full_run else STANDING_BY, BATCH):
        await publish_delayed(broker, *[delayed(b"", 3_000) for _ in range(BATCH)])
    started = time.monotonic()
    await publish_delayed(broker, delayed(b"soon", 1))
    await publish(broker, [b"now"])
    await listener.until_count(2)
    assert listener.bodies == [b"now", b"soon"]
    assert time.monotonic() - started < 1 + broker.capabilities.delay_resolution_seconds + LATE_SECONDS_MAX


async def test_many_that_become_visible_together_all_come_once(broker: Broker, *, full_run: bool) -> None:
    await declare(broker, BILLING)
    listener = await listen(broker, BILLING)
    bodies = [b"%05d" % number for number in range(5_000 if full_run else 2_000)]
    for start in range(0, len(bodies), BATCH):
        await publish_delayed(broker, *[delayed(body, 3) for body in bodies[start : start + BATCH]])
    await listener.until_count(len(bodies))
    assert listener.bodies == bodies
    assert min(at - (one.message.visible_at or 0.0) for at, one in zip(listener.came_at, listener.deliveries)) >= 0.0  # noqa: B905


def test_a_message_waits_since_it_is_visible() -> None:
    sent = message()
    assert sent.waiting_since == sent.published_at
    assert sent._replace(visible_at=5.0).waiting_since == 5.0
    assert Message._field_defaults == {"visible_at": None, "expires_at": None}
