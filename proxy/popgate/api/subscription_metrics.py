"""Renders the metrics of subscriptions: their messages, their clients, and the times of their messages.

``read`` takes the numbers from the engine on the event loop. ``SubscriptionFigures.families`` then builds the metrics,
which may run in another thread.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from popgate.domain.names import Subscription
from popgate.engine.engine import Engine
from popgate.engine.subscription.gauges import SubscriptionGauges
from popgate.journal.counters import OTHER, EventCounters
from popgate.journal.timings import GroupTimings
from popgate.ports.journal import TOPIC_EVENTS, EventKind

LABELS = ("topic", "group")
COUNTED = (EventKind.DELIVERED, EventKind.ACKED, EventKind.EXPIRED, EventKind.DEAD_LETTERED)
"""The kinds of events that each group shows from the start, as 0. Prometheus does not see that a counter has grown that
begins with its first event."""
GAUGES = {
    "ready": "Messages that wait for a pop, also those that only the broker has (read every few seconds)",
    "ready_buffered": "Messages in this process that the next pop may take",
    "in_flight": "Leased messages of the queues that this proxy owns",
    "delayed": "Messages that wait for their retry, and delayed messages as far as the broker counts them by queue",
    "blocked": "Messages that wait behind an earlier one of their ordering key; they also count as ready",
    "dead": "Messages in the dead-letter queue",
    "buffer_bytes": "Memory of the messages whose bodies are in this process",
    "parked_pops": "Pops and pulls that wait for a message",
    "stuck": "Messages that not even the dead letters take, because popgate fails on them",
    "paused": "1 where the group is paused; the owner of its first queue says so",
    "oldest_message_age_seconds": "The oldest message that waits has waited at least so long; 0 without one",
    "oldest_lease_age_seconds": "How long ago the oldest lease was given; 0 where nothing is leased",
}
"""For each gauge, without ``popgate_``: its help text."""
HISTOGRAMS = {
    "publish_to_delivery_seconds": "From the time when a message became visible until its first delivery",
    "delivery_to_ack_seconds": "From the delivery of a message until its ack",
    "lease_duration_seconds": "How long leases lasted, however they ended",
}


class SubscriptionFigures(NamedTuple):
    """The numbers of all subscriptions at one moment. The groups beyond the maximum share one row of ``gauges``.

    ``left_out``: the number of groups that share it.
    """

    gauges: Sequence[SubscriptionGauges]
    counts: Sequence[tuple[tuple[EventKind, Subscription], int]]
    timings: Sequence[tuple[Subscription, GroupTimings]]
    left_out: int

    def families(self) -> Iterator[Metric]:
        """Build the metrics."""
        yield self._events()
        yield from self._polls()
        yield from self._measured()
        yield from self._timed()
        yield GaugeMetricFamily(
            "popgate_groups_left_out",
            'Groups without rows of their own: they share the rows "(other)" (--metrics-groups-max)',
            value=self.left_out,
        )

    def _events(self) -> Metric:
        counts: dict[tuple[EventKind, Subscription], int] = {}
        for one in self.gauges:
            counts.update({(kind, Subscription(one.topic, one.group)): 0 for kind in COUNTED})
        counts.update(self.counts)
        events = CounterMetricFamily(
            "popgate_events", "Delivery events; those of publishers carry no group", labels=["kind", *LABELS]
        )
        for (kind, (topic, group)), count in counts.items():
            events.add_metric([kind, topic, "" if kind in TOPIC_EVENTS else group], count)
        return events

    def _polls(self) -> Iterator[Metric]:
        polls = CounterMetricFamily(
            "popgate_polls", "Pops and pulls that clients have sent to this proxy", labels=LABELS
        )
        again = CounterMetricFamily(
            "popgate_redeliveries", "Deliveries of messages that had been delivered before", labels=LABELS
        )
        timings = dict(self.timings)
        for one in self.gauges:
            polls.add_metric([one.topic, one.group], one.polls)
            timed = timings.get(Subscription(one.topic, one.group))
            again.add_metric([one.topic, one.group], 0 if timed is None else timed.redelivered_count)
        yield from (polls, again)

    def _measured(self) -> Iterator[Metric]:
        for name, documentation in GAUGES.items():
            gauge = GaugeMetricFamily(f"popgate_{name}", documentation, labels=LABELS, unit=_unit(name))
            attribute = name.replace("oldest_message_age", "oldest_age")
            for one in self.gauges:
                gauge.add_metric([one.topic, one.group], getattr(one, attribute))
            yield gauge

    def _timed(self) -> Iterator[Metric]:
        waits, acks, leases = (
            HistogramMetricFamily(f"popgate_{name}", documentation, labels=LABELS, unit="seconds")
            for name, documentation in HISTOGRAMS.items()
        )
        for labels, timed in self.timings:
            both = timed.delivery_to_ack.with_other(timed.other_leases)
            for family, histogram in (
                (waits, timed.publish_to_delivery),
                (acks, timed.delivery_to_ack),
                (leases, both),
            ):
                family.add_metric(labels, histogram.buckets(), histogram.total_seconds)
        yield from (waits, acks, leases)


def subscription_figures(engine: Engine, counters: EventCounters) -> SubscriptionFigures:
    """Read the numbers of all subscriptions. The counts of deleted topics and groups are dropped."""
    topics = engine.topics
    counters.keep(topics.specs, topics.served)
    others: SubscriptionGauges | None = None
    rows: list[SubscriptionGauges] = []
    polls: dict[Subscription, int] = {}
    for one in engine.gauges():
        name = Subscription(one.topic, one.group)
        if counters.named(name) != OTHER:
            rows.append(one)
            continue
        polls[name] = one.polls
        others = one if others is None else others.with_other(one)
    other_polls = counters.polls_of_others(polls)
    if others is not None:
        rows.append(others._replace(topic=OTHER.topic, group=OTHER.group, polls=other_polls))
    return SubscriptionFigures(rows, list(counters.counts.items()), list(counters.timings.items()), len(polls))


def _unit(name: str) -> str:
    unit = name.rpartition("_")[2]
    return unit if unit in ("bytes", "seconds") else ""
