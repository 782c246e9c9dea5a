"""What every broker adapter must do: the promises of ``popgate.ports.broker``."""

import asyncio

import pytest

from contract.recorder import TOPIC, Recorder, declare, layout, message, numbered, publish
from popgate.domain.errors import QueueGone
from popgate.domain.message import HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX
from popgate.domain.names import BrokerQueue, TopicName
from popgate.ports.broker import Broker, Outgoing, PublishOutcome, PublishStatus

pytestmark = pytest.mark.rabbitmq_versions

BILLING = layout("billing")
QUEUE = BILLING.queues[0]

# ---------------------------------------------------------------- publishing


async def test_a_message_arrives_as_it_was_published(broker: Broker) -> None:
    await declare(broker, BILLING)
    headers = {
        "tenant": "açaí ☕",
        "größe": 7,
        "ratio": 0.5,
        "big": 2**53 + 1,
        "urgent": True,
        "none": None,
        "": "empty",
    }
    published = message(b"\x00\xff body", headers=headers, ordering_key="kündin 7", message_id="ïd")
    await broker.publish([Outgoing(message=published, topic=TOPIC)])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    (delivery,) = await listener.until_count(1)
    assert delivery.message == published
    assert delivery.identified
    assert delivery.earlier_deliveries == 0


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, MESSAGE_BYTES_MAX])
async def test_bodies_of_every_size_arrive_whole(broker: Broker, size: int) -> None:
    await declare(broker, BILLING)
    body = (b"%08d" % size * (size // 8 + 1))[:size]
    await publish(broker, [body, b"after"])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(2)
    assert listener.bodies == [body, b"after"]


async def test_headers_of_the_greatest_size_arrive(broker: Broker) -> None:
    await declare(broker, BILLING)
    headers = {f"h{number}": "x" * 1000 for number in range(HEADERS_BYTES_MAX // 1010)}
    await broker.publish([Outgoing(message=message(headers=headers), topic=TOPIC)])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    (delivery,) = await listener.until_count(1)
    assert delivery.message.headers == headers


@pytest.mark.parametrize("name", ["CC", "BCC", "x-death", "x-delivery-count", "content-type"])
async def test_no_header_name_means_anything_to_the_broker(broker: Broker, name: str) -> None:
    await declare(broker, BILLING)
    await broker.publish([Outgoing(message=message(headers={name: "5"}), topic=TOPIC)])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    (delivery,) = await listener.until_count(1)
    assert delivery.message.headers == {name: "5"}
    assert delivery.earlier_deliveries == 0


async def test_every_group_of_a_topic_gets_a_message_once(broker: Broker) -> None:
    shipping = layout("shipping")
    await declare(broker, BILLING, shipping)
    await publish(broker, numbered(1, 3))
    listeners = [Recorder(), Recorder()]
    for each, listener in zip([BILLING, shipping], listeners, strict=True):
        await broker.consume(each.queues[0], each, 10, listener)
        await listener.until_count(3)
    assert [listener.bodies for listener in listeners] == [numbered(1, 3)] * 2


async def test_the_index_chooses_the_queue(broker: Broker) -> None:
    wide = layout(queue_count=3)
    await declare(broker, wide)
    for index in range(3):
        await publish(broker, [b"for %d" % index], index=index)
    for index in range(3):
        listener = Recorder()
        await broker.consume(wide.queues[index], wide, 10, listener)
        await listener.until_count(1)
        assert listener.bodies == [b"for %d" % index]


async def test_messages_of_one_topic_do_not_reach_another(broker: Broker) -> None:
    other = layout(topic=TopicName("invoices"))
    await declare(broker, BILLING, other)
    await publish(broker, [b"order"])
    assert [depth.ready for depth in await broker.depth([QUEUE, other.queues[0]])] == [1, 0]


async def test_a_message_that_no_queue_takes_is_unrouted(broker: Broker) -> None:
    await broker.declare_topic(TOPIC)
    nowhere = [
        Outgoing(message=message(b"no group"), topic=TOPIC),
        Outgoing(message=message(b"no topic"), topic=TopicName("nothing")),
        Outgoing(message=message(b"no queue"), queue=BrokerQueue("nothing")),
    ]
    assert [outcome.status for outcome in await broker.publish(nowhere)] == [PublishStatus.UNROUTED] * 3


async def test_a_copy_that_no_queue_took_is_stored_when_it_is_published_again(broker: Broker) -> None:
    again = [Outgoing(message=message(b"again"), queue=QUEUE)]
    assert [outcome.status for outcome in await broker.publish(again)] == [PublishStatus.UNROUTED]
    await declare(broker, BILLING)
    assert [outcome.status for outcome in await broker.publish(again)] == [PublishStatus.PUBLISHED]


async def test_outcomes_are_in_the_order_of_the_messages(broker: Broker) -> None:
    await declare(broker, BILLING)
    missing = BrokerQueue("nothing")
    mixed = [
        Outgoing(message=message(b"%d" % number), queue=missing if number % 3 == 0 else QUEUE) for number in range(200)
    ]
    outcomes = await broker.publish(mixed)
    expected = [PublishStatus.UNROUTED if number % 3 == 0 else PublishStatus.PUBLISHED for number in range(200)]
    assert [outcome.status for outcome in outcomes] == expected


async def test_a_publish_to_one_queue_reaches_the_dead_letter_queue_too(broker: Broker) -> None:
    await declare(broker, BILLING)
    await broker.publish([Outgoing(message=message(b"dead"), queue=BILLING.dead)])
    assert [depth.ready for depth in await broker.depth([BILLING.dead, QUEUE])] == [1, 0]


async def test_nothing_to_publish_is_no_error(broker: Broker) -> None:
    assert await broker.publish([]) == []


async def test_many_publishers_at_once_lose_nothing(broker: Broker) -> None:
    await declare(broker, BILLING)
    await asyncio.gather(*[publish(broker, numbered(start, start + 99)) for start in range(0, 2000, 100)])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 5000, listener)
    await listener.until_count(2000)
    assert sorted(listener.bodies) == sorted(numbered(0, 1999))


# ---------------------------------------------------------------- consuming


async def test_messages_come_in_the_order_of_their_publishes(broker: Broker) -> None:
    await declare(broker, BILLING)
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 1000, listener)
    for start in range(0, 300, 50):
        await publish(broker, numbered(start, start + 49))
    await listener.until_count(300)
    assert listener.bodies == numbered(0, 299)
    assert listener.tags == sorted(set(listener.tags))


async def test_no_more_than_the_prefetch_is_unsettled(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 20))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 5, listener)
    await listener.until_count(5)
    assert await channel.backlog() == 15
    assert listener.bodies == numbered(1, 5)
    channel.ack(listener.tags[1:3])
    await listener.until_count(7)
    assert await channel.backlog() == 13
    assert listener.bodies == numbered(1, 7)


async def test_acks_are_taken_in_any_order(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 6))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(6)
    one, two, three, four, five, six = listener.tags
    channel.ack([five, two])
    channel.ack([six])
    channel.ack([one])
    await channel.close()
    again = Recorder()
    await broker.consume(QUEUE, BILLING, 10, again)
    await again.until_count(2)
    assert again.bodies == [b"3", b"4"]
    assert {three, four}.isdisjoint({one, two})


async def test_acks_of_unknown_and_of_settled_deliveries_are_ignored(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 3))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(3)
    first, second, third = listener.tags
    channel.ack([first, first, 4711])
    channel.ack([first])
    channel.requeue([first, 4712])
    await channel.flush()
    channel.ack([first, third])
    await channel.flush()
    assert await channel.backlog() == 0
    assert listener.ends == []
    channel.ack([second])
    await channel.close()
    assert [depth.ready for depth in await broker.depth([QUEUE])] == [0]


async def test_a_delivery_that_is_given_back_comes_again_before_newer_messages(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 10))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 3, listener)
    await listener.until_count(3)
    channel.requeue([listener.tags[1]])
    await listener.until_count(4)
    again = listener.deliveries[3]
    assert again.message.body == b"2"
    assert again.tag not in listener.tags[:3]
    channel.ack([again.tag, *listener.tags[::2]])
    await listener.until_count(7)
    assert listener.bodies[4:7] == numbered(4, 6)


async def test_what_is_unsettled_comes_back_in_order_ahead_of_newer_messages(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 50))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 40, listener)
    await listener.until_count(40)
    channel.ack(listener.tags[10:20])
    await publish(broker, numbered(51, 60))
    await channel.close()
    again = Recorder()
    await broker.consume(QUEUE, BILLING, 100, again)
    await again.until_count(50)
    assert again.bodies == numbered(1, 10) + numbered(21, 60)


async def test_a_closed_channel_says_nothing_more_and_takes_nothing_more(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 3))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 2, listener)
    tags = [delivery.tag for delivery in await listener.until_count(2)]
    await channel.close()
    channel.ack(tags)
    channel.requeue(tags)
    await channel.flush()
    await channel.resize(5)
    await channel.close()
    assert channel.settled_evidence() == 0
    assert listener.ends == []
    again = Recorder()
    await broker.consume(QUEUE, BILLING, 10, again)
    await again.until_count(3)
    assert again.bodies == numbered(1, 3)
    assert len(listener.deliveries) == 2


async def test_acks_given_right_before_close_count(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 100))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 200, listener)
    await listener.until_count(100)
    channel.ack(listener.tags[:99])
    await channel.close()
    again = Recorder()
    second = await broker.consume(QUEUE, BILLING, 200, again)
    await again.until_count(1)
    assert await second.backlog() == 0
    assert again.bodies == [b"100"]


async def test_a_resize_keeps_what_is_held(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 30))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 4, listener)
    await listener.until_count(4)
    await channel.resize(8)
    await listener.until_count(8)
    assert listener.bodies[:8] == numbered(1, 8)
    channel.ack(listener.tags[:4])
    await channel.flush()
    await channel.close()
    again = Recorder()
    await broker.consume(QUEUE, BILLING, 100, again)
    await again.until_count(26)
    assert again.bodies == numbered(5, 30)


async def test_a_resize_to_zero_pauses_until_the_next_one(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 10))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 3, listener)
    await listener.until_count(3)
    await channel.resize(0)
    held = len(listener.deliveries)
    channel.ack(listener.tags)
    assert await channel.backlog() == 10 - held
    assert len(listener.deliveries) == held
    await channel.resize(20)
    await listener.until_count(10)
    assert listener.bodies == numbered(1, 10)


async def test_a_consumption_may_begin_paused(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 2))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 0, listener)
    assert await channel.backlog() == 2
    assert listener.deliveries == []
    await channel.resize(10)
    await listener.until_count(2)


async def test_the_listener_hears_nothing_before_it_has_its_channel(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 5))
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    assert listener.deliveries == []
    await listener.until_count(5)


async def test_evidence_grows_with_later_deliveries_and_never_ahead_of_acks(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 100))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(10)
    assert channel.settled_evidence() == 0
    acked = 0
    while acked < 90:
        channel.ack(listener.tags[acked : acked + 5])
        acked += 5
        await listener.until_count(min(100, acked + 10))
        assert channel.settled_evidence() <= acked
    await channel.flush()
    assert channel.settled_evidence() >= 80


async def test_evidence_is_kept_over_a_resize_and_goes_on_after_it(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 200))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(10)
    channel.ack(listener.tags[:10])
    await listener.until_count(20)
    before = channel.settled_evidence()
    await channel.resize(5)
    assert before <= channel.settled_evidence() <= 10
    acked = 10
    while acked < 100:
        count = len(listener.deliveries)
        channel.ack(listener.tags[acked:count])
        acked = count
        await listener.until_count(count + 1)
        assert channel.settled_evidence() <= acked
    await channel.flush()
    assert channel.settled_evidence() >= 80


# ---------------------------------------------------------------- queues that come and go


async def test_a_missing_queue_can_not_be_consumed(broker: Broker) -> None:
    with pytest.raises(QueueGone):
        await broker.consume(QUEUE, BILLING, 10, Recorder())
    with pytest.raises(QueueGone):
        await broker.consume(QUEUE, BILLING, 0, Recorder())


async def test_a_queue_that_is_deleted_ends_its_channel_once(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 3))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(3)
    await broker.delete_group(BILLING)
    _, queue_gone = await listener.until_lost()
    assert queue_gone
    channel.ack(listener.tags)
    await channel.flush()
    await channel.close()
    with pytest.raises(QueueGone):
        await broker.consume(QUEUE, BILLING, 10, Recorder())
    assert len(listener.ends) == 1


async def test_a_queue_that_is_declared_again_is_a_new_one(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, [b"old"])
    await broker.delete_group(BILLING)
    await declare(broker, BILLING)
    await publish(broker, [b"new"])
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    await listener.until_count(1)
    assert listener.bodies == [b"new"]


async def test_declaring_and_deleting_twice_changes_nothing(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, [b"kept"])
    await declare(broker, BILLING)
    assert [depth.ready for depth in await broker.depth([QUEUE])] == [1]
    for _ in range(2):
        await broker.delete_group(BILLING)
        await broker.delete_topic(TOPIC)
    assert [depth.ready for depth in await broker.depth([QUEUE, BILLING.dead])] == [None, None]
    outcomes = await broker.publish([Outgoing(message=message(), topic=TOPIC)])
    assert [outcome.status for outcome in outcomes] == [PublishStatus.UNROUTED]


async def test_no_publish_fails_while_one_of_the_groups_is_deleted(broker: Broker) -> None:
    """RabbitMQ before 4.3 ends the connection of a publisher to a queue that is being deleted."""
    shipping = layout("shipping", queue_count=2)
    await declare(broker, BILLING, shipping)
    outcomes: list[PublishOutcome] = []
    is_over = asyncio.Event()

    async def publish_all_the_time() -> None:
        while not is_over.is_set():
            outcomes.extend(
                await broker.publish([Outgoing(message=message(b"x"), topic=TOPIC, index=0) for _ in range(20)])
            )

    publishing = asyncio.create_task(publish_all_the_time())
    for _ in range(5):
        await broker.delete_group(shipping)
        await broker.declare_group(shipping)
        await asyncio.sleep(0.1)
    is_over.set()
    await publishing
    assert {outcome.status for outcome in outcomes} == {PublishStatus.PUBLISHED}


async def test_depth_counts_what_waits_at_the_broker(broker: Broker) -> None:
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 10))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 4, listener)
    await listener.until_count(4)
    await channel.backlog()
    missing, depth = await broker.depth([BrokerQueue("nothing"), QUEUE])
    assert missing.ready is None
    assert (depth.ready, depth.consumers) == (6, 1)


async def test_a_queue_is_inspected_without_being_touched(broker: Broker) -> None:
    if not broker.capabilities.adopts_queues:
        pytest.skip("this broker adopts no queues")
    await declare(broker, BILLING)
    await publish(broker, numbered(1, 3))
    for _ in range(2):
        facts = await broker.inspect(QUEUE)
        assert (facts.exists, facts.kind, facts.ready, facts.consumers) == (True, "quorum", 3, 0)
    assert not (await broker.inspect(BrokerQueue("nothing"))).exists
    assert [depth.ready for depth in await broker.depth([QUEUE, BrokerQueue("nothing")])] == [3, None]


async def test_stopping_ends_every_channel_and_may_be_repeated(broker: Broker) -> None:
    await declare(broker, BILLING)
    listener = Recorder()
    await broker.consume(QUEUE, BILLING, 10, listener)
    await broker.stop()
    _, queue_gone = await listener.until_lost()
    assert not queue_gone
    await broker.stop()
    assert broker.unavailable_reason() is not None
