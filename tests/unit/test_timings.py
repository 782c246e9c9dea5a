"""The times that /metrics shows are measured once a batch, and count every message."""

from types import SimpleNamespace
from typing import Any

import pytest

from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.journal.counters import OTHER, EventCounters
from popgate.journal.timings import SAMPLES_MAX, GroupTimings
from popgate.ports.journal import EventKind
from popgate.runtime.histogram import Histogram

GROUP = Subscription(TopicName("t"), GroupName("g"))
NOW = 1_000.0


def subject(*, waited: float = 0.0, leased: float = 0.0, deliveries: int = 1) -> Any:
    """Return a message that was published ``waited`` and leased ``leased`` seconds ago."""
    return SimpleNamespace(delivery_count=deliveries, leased_at=NOW - leased, message=message(NOW - waited))


def message(published_at: float) -> Message:
    return Message(
        copy_id=CopyId("1"), message_id="1", body=b"", headers={}, ordering_key=None, published_at=published_at
    )


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


@pytest.mark.parametrize("size", [1, SAMPLES_MAX, SAMPLES_MAX + 1, 256, 1_000])
def test_every_message_of_a_batch_counts_however_few_are_measured(size: int) -> None:
    timings = GroupTimings()
    batch = [subject(waited=2.0, leased=3.0) for _ in range(size)]
    timings.note(EventKind.DELIVERED, batch, NOW)
    timings.note(EventKind.ACKED, batch, NOW)
    timings.note(EventKind.EXPIRED, batch, NOW)
    for histogram, seconds in (
        (timings.publish_to_delivery, 2.0),
        (timings.delivery_to_ack, 3.0),
        (timings.other_leases, 3.0),
    ):
        assert count(histogram) == size
        assert histogram.total_seconds == pytest.approx(seconds * size)


def test_a_redelivery_is_counted_and_its_wait_is_not_that_of_a_first_delivery() -> None:
    timings = GroupTimings()
    timings.note(EventKind.DELIVERED, [subject(waited=1.0), subject(waited=99.0, deliveries=3)], NOW)
    assert timings.redelivered_count == 1
    assert count(timings.publish_to_delivery) == 1
    assert timings.publish_to_delivery.total_seconds == pytest.approx(1.0)


def test_what_is_not_known_is_not_measured() -> None:
    timings = GroupTimings()
    bare = SimpleNamespace(delivery_count=1, leased_at=0.0, message=None)
    timed: Any = [bare, SimpleNamespace(delivery_count=1, leased_at=0.0, message=message(0.0))]
    timings.note(EventKind.DELIVERED, timed, NOW)
    timings.note(EventKind.ACKED, timed, NOW)
    assert count(timings.publish_to_delivery) == count(timings.delivery_to_ack) == 0


def test_the_buckets_of_prometheus_include_their_bounds_and_grow() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (-5.0, 1.0, 1.5, 99.0):
        histogram.add(seconds)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total_seconds == pytest.approx(101.5)
    assert histogram.with_other(histogram).counts == [4, 2, 2]


def test_groups_beyond_the_maximum_share_their_times_and_a_deleted_group_loses_them() -> None:
    counters = EventCounters(named_max=1)
    other = Subscription(TopicName("u"), GroupName("g"))
    for name in (GROUP, other):
        counters.record(EventKind.DELIVERED, name, [subject(waited=1.0)], NOW)
    assert set(counters.timings) == {GROUP, OTHER}
    counters.forget(GROUP)
    assert set(counters.timings) == {OTHER}


def test_a_proxy_counts_the_queues_that_it_takes_and_gives_up() -> None:
    counters = EventCounters()
    for kind in (EventKind.QUEUE_CLAIMED, EventKind.QUEUE_CLAIMED, EventKind.QUEUE_RELEASED, EventKind.MODE_CHANGED):
        counters.note(kind, GROUP.topic, NOW)
    assert counters.queue_moves == {EventKind.QUEUE_CLAIMED: 2, EventKind.QUEUE_RELEASED: 1}
