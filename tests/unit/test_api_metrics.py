"""The counts behind /metrics: they are removed together with the object that they count."""

from types import SimpleNamespace
from typing import Any

from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.journal.counters import OTHER as ALL_OTHERS
from popgate.journal.counters import EventCounters
from popgate.ports.journal import EventKind

TOPIC = TopicName("t")
DEFAULT, TAIL = Subscription(TOPIC, GroupName("default")), Subscription(TOPIC, GroupName("tail-1"))
OTHER = Subscription(TopicName("u"), GroupName("default"))
SUBJECT: Any = SimpleNamespace(delivery_count=1, leased_at=0.0, message=None)


def counters() -> EventCounters:
    """Return counters with the counts of a topic with two groups, and of another topic."""
    counters = EventCounters()
    for subscription in (DEFAULT, TAIL, OTHER):
        for kind in (EventKind.DELIVERED, EventKind.ACKED):
            counters.record(kind, subscription, [SUBJECT], 0.0)
    for subscription in (DEFAULT, OTHER):  # published events carry the default group's name
        counters.record(EventKind.PUBLISHED, subscription, [SUBJECT], 0.0)
    return counters


def test_a_deleted_group_is_not_counted_any_more_and_all_else_is() -> None:
    kept = counters()
    kept.forget(TAIL)
    assert {subscription for _, subscription in kept.counts} == {DEFAULT, OTHER}
    assert len(kept.counts) == 6


def test_what_was_published_to_a_topic_outlives_its_default_group() -> None:
    kept = counters()
    kept.forget(DEFAULT)
    assert [kind for kind, subscription in kept.counts if subscription == DEFAULT] == [EventKind.PUBLISHED]


def test_a_deleted_topic_leaves_nothing() -> None:
    kept = counters()
    kept.forget_topic(TOPIC)
    assert {subscription for _, subscription in kept.counts} == {OTHER}


def test_only_so_many_groups_are_counted_under_their_own_names_and_none_of_their_events_moves() -> None:
    kept = EventCounters(named_max=2)
    for subscription in (DEFAULT, TAIL, OTHER, OTHER):
        kept.record(EventKind.ACKED, subscription, [SUBJECT], 0.0)
    expected = {DEFAULT: 1, TAIL: 1, ALL_OTHERS: 2}
    assert kept.counts == {(EventKind.ACKED, subscription): count for subscription, count in expected.items()}
    kept.forget(TAIL)
    kept.record(EventKind.ACKED, OTHER, [SUBJECT], 0.0)
    assert kept.counts[EventKind.ACKED, OTHER] == 1, "a place was free"
    assert kept.counts[EventKind.ACKED, ALL_OTHERS] == 2, "a counter never shrinks"


def test_groups_that_were_deleted_through_another_proxy_give_up_their_names() -> None:
    kept = counters()
    kept.record(EventKind.PUBLISHED, TAIL, [SUBJECT], 0.0)
    kept.keep(topics={TOPIC}, groups={DEFAULT})
    assert set(kept.counts) == {
        (EventKind.DELIVERED, DEFAULT),
        (EventKind.ACKED, DEFAULT),
        (EventKind.PUBLISHED, DEFAULT),
        (EventKind.PUBLISHED, TAIL),
    }
    kept.keep(topics=set(), groups=set())
    assert kept.counts == {}


def test_the_polls_of_groups_that_share_a_row_never_fall() -> None:
    counted = EventCounters(named_max=0)
    assert counted.polls_of_others({DEFAULT: 5, TAIL: 3}) == 8
    assert counted.polls_of_others({DEFAULT: 6}) == 9, "one was deleted"
    assert counted.polls_of_others({DEFAULT: 6, TAIL: 1}) == 10, "it was created again"
    assert counted.polls_of_others({DEFAULT: 0, TAIL: 2}) == 11, "the other one, too"
    assert counted.polls_of_others({}) == 11
