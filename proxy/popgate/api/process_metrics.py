"""Renders the metrics of a proxy as a whole: its requests, its queues, and the times of its round trips."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from popgate import __version__
from popgate.api.request_counts import RequestCounts
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.ports.journal import EventKind
from popgate.runtime.histogram import Histogram


class RoundTrip(NamedTuple):
    """A kind of round trip: to which server, and for what."""

    to: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """What is measured outside the engine: how long round trips took, and how late the event loop ran its timers."""

    round_trips: Mapping[RoundTrip, Histogram] = field(default_factory=dict[RoundTrip, Histogram])
    loop_lag: Histogram | None = None


class ProxyCollector(Collector):
    """Metrics of the proxy, read at scrape time."""

    def __init__(
        self, engine: Engine, counters: EventCounters, requests: RequestCounts, figures: ProcessFigures
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._requests = requests
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        build = GaugeMetricFamily(
            "popgate_build_info", "The version and the broker, as labels", labels=["version", "broker"]
        )
        build.add_metric([__version__, self._engine.capabilities.name], 1)
        yield build
        yield from self._requested()
        yield from self._owned()
        yield from self._timed()

    def _requested(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("popgate_http_requests", "Answered requests", labels=["operation", "status"])
        for (operation, status), count in list(self._requests.counts.items()):
            requests.add_metric([operation, str(status)], count)
        yield requests
        yield GaugeMetricFamily(
            "popgate_http_connections", "Open connections of clients", value=self._requests.connections()
        )
        faults = CounterMetricFamily(
            "popgate_faults", "Failures inside popgate that were contained; each is in the log", labels=["part"]
        )
        for part, count in self._engine.faults().items():
            faults.add_metric([part], count)
        yield faults

    def _owned(self) -> Iterator[Metric]:
        now = self._engine.proxy_gauges()
        for name, documentation, value in (
            ("queues_owned", "Queues that this proxy owns", now.owned),
            ("queues_unowned", "Queues that no proxy owns; one proxy of a cluster counts them", now.unowned),
            ("queues_missing", "Queues of this proxy that were deleted on the broker", now.missing),
        ):
            yield GaugeMetricFamily(f"popgate_{name}", documentation, value=value)
        moves = CounterMetricFamily(
            "popgate_queue_moves", "Queues that this proxy has taken over or given up", labels=["direction"]
        )
        moves.add_metric(["taken"], self._counters.queue_moves[EventKind.QUEUE_CLAIMED])
        moves.add_metric(["given"], self._counters.queue_moves[EventKind.QUEUE_RELEASED])
        yield moves
        available = GaugeMetricFamily(
            "popgate_available", "1 where this proxy can use the broker and the store of the leases", labels=["part"]
        )
        available.add_metric(["broker"], now.has_broker)
        available.add_metric(["store"], now.has_store)
        yield available
        yield GaugeMetricFamily(
            "popgate_backlog_age_seconds",
            "How old popgate_ready, popgate_dead and popgate_oldest_message_age_seconds are",
            value=self._engine.backlogs.age_seconds,
            unit="seconds",
        )

    def _timed(self) -> Iterator[Metric]:
        trips = HistogramMetricFamily(
            "popgate_round_trip_seconds",
            "How long the broker, the store and other proxies took to answer",
            labels=RoundTrip._fields,
            unit="seconds",
        )
        peers = self._engine.peer_ask_seconds
        asked = {} if peers is None else {RoundTrip("peer", "ask"): peers}
        for trip, histogram in {**self._figures.round_trips, **asked}.items():
            trips.add_metric(trip, histogram.buckets(), histogram.total_seconds)
        yield trips
        lag = self._figures.loop_lag
        if lag is not None:
            yield HistogramMetricFamily(
                "popgate_event_loop_lag_seconds",
                "How late this process runs what is due, measured twice a second",
                lag.buckets(),
                lag.total_seconds,
                unit="seconds",
            )
