"""Serves /metrics: counters, gauges and histograms of the process, in Prometheus' text format or as OpenMetrics.

The values are read from the event counters, the engine and the locks at each scrape, so no value is stored twice. Each
application has its own registry, so that two applications in one process don't conflict.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.types import Scope

from popgate.api.asked import query_values
from popgate.api.problems import ProxyNotFound
from popgate.api.process_metrics import ProcessFigures, ProxyCollector
from popgate.api.request_counts import RequestCounts
from popgate.api.subscription_metrics import SubscriptionFigures, subscription_figures
from popgate.domain.names import InstanceId
from popgate.domain.replica_plan import Verdict
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.journal.figures import JournalFigures
from popgate.locks.hosted import HostedLocks
from popgate.replicas.keeper import ReplicaKeeper

OPEN_METRICS = "application/openmetrics-text"
# The library declares no types for it.
_write_open_metrics: Any = openmetrics.generate_latest  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
METRICS_PATH = "/metrics"
_PROXY = "proxy"


def metrics_proxy(engine: Engine, scope: Scope) -> InstanceId | None:
    """Return the other proxy whose metrics ``GET /metrics?proxy=ID`` requests, or None for this proxy.

    Workers share one port, so a scraper names the worker. Raises: ProxyNotFound; InvalidRequest.
    """
    proxy = query_values(scope["query_string"], _PROXY).get(_PROXY)
    if proxy is None:
        return None
    status = engine.cluster_status()
    if proxy == status.me:
        return None
    if proxy not in {member.instance for member in status.members}:
        raise ProxyNotFound(proxy)
    return InstanceId(proxy)


class JournalCollector(Collector):
    """Metrics of the journal's files, read at scrape time."""

    def __init__(self, figures: Callable[[], JournalFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        now = self._figures()
        for name, documentation, count in (
            ("events_written", "Events of the journal that are in finished files", now.written_events),
            ("events_dropped", "Events that the journal has lost: more came than it could write", now.dropped_events),
            ("files", "Files of the journal that are finished", now.file_count),
            ("bytes", "The size of these files", now.file_bytes),
            ("write_failures", "Attempts to write a file of the journal that failed", now.failed_writes),
        ):
            yield CounterMetricFamily(f"popgate_journal_{name}", documentation, value=count)
        waiting = "Events of the journal that are in no finished file yet"
        yield GaugeMetricFamily("popgate_journal_buffered_events", waiting, value=now.buffered_events)
        lag = "How old the oldest of these is; 0 where there is none"
        yield GaugeMetricFamily("popgate_journal_lag_seconds", lag, value=now.lag_seconds)


class LockCollector(Collector):
    """Metrics of the locks that the proxy holds, read at scrape time."""

    def __init__(self, locks: HostedLocks) -> None:
        self._locks = locks

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("popgate_locks_held", "Locks that clients hold through this proxy", labels=["kind"])
        waiting = GaugeMetricFamily("popgate_locks_waiting", "Clients that wait here for a lock", labels=["kind"])
        counts = Counter(hosted.definition.kind for hosted in self._locks.grants.all())
        for kind, count in self._locks.waiting_by_kind().items():
            held.add_metric([kind], counts[kind])
            waiting.add_metric([kind], count)
        events = CounterMetricFamily(
            "popgate_lock_events", "What became of attempts to acquire locks, and of locks", labels=["event", "kind"]
        )
        for (event, kind), count in list(self._locks.grants.counts.items()):
            events.add_metric([event, kind], count)
        yield from (held, waiting, events)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFigures:
    """What /metrics tells about access. ``is_insecure``: other machines can reach the server without authentication or
    TLS. ``certificate_ends_at`` returns Unix seconds. The functions are None if there is no keys file, no TLS, and no
    audit log, respectively."""

    is_insecure: bool = False
    keys_are_stale: Callable[[], bool] | None = None
    tls_is_stale: Callable[[], bool] | None = None
    certificate_ends_at: Callable[[], float] | None = None
    audit_dropped: Callable[[], int] | None = None


class AccessCollector(Collector):
    """Metrics of the access control, read at scrape time."""

    def __init__(self, figures: AccessFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        now = self._figures
        insecure = "1 where --insecure lets other machines reach this proxy without authentication or TLS"
        yield GaugeMetricFamily("popgate_insecure", insecure, value=float(now.is_insecure))
        if now.keys_are_stale is not None:
            stale = "1 where the keys file is wrong, so that older keys are in use"
            yield GaugeMetricFamily("popgate_keys_stale", stale, value=float(now.keys_are_stale()))
        if now.tls_is_stale is not None:
            stale = "1 where the TLS files are wrong, so that an older certificate is in use"
            yield GaugeMetricFamily("popgate_tls_stale", stale, value=float(now.tls_is_stale()))
        if now.certificate_ends_at is not None:
            yield GaugeMetricFamily(
                "popgate_tls_certificate_end_timestamp_seconds",
                "When the first certificate of the chain for clients ends, in seconds since 1970",
                value=now.certificate_ends_at(),
                unit="seconds",
            )
        if now.audit_dropped is not None:
            dropped = "Records of the audit log that are lost, and that no line of the log has told yet"
            yield GaugeMetricFamily("popgate_audit_records_dropped", dropped, value=now.audit_dropped())


class ReplicaCollector(Collector):
    """Metrics of this proxy's replica keeper, read at scrape time. While the keeper is active, the metrics include its
    latest survey."""

    def __init__(self, keeper: ReplicaKeeper) -> None:
        self._keeper = keeper

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "popgate_replica_keeper_at_work",
            "1 where the replica keeper of this proxy is the one at work",
            value=float(self._keeper.is_at_work),
        )
        changes = GaugeMetricFamily("popgate_replica_changes_under_way", "Changes of replicas", labels=["kind"])
        for kind, count in Counter(change.kind for change in self._keeper.under_way).items():
            changes.add_metric([kind], count)
        queues = GaugeMetricFamily(
            "popgate_replica_queues", "Quorum queues and streams, by what is to be done", labels=["verdict"]
        )
        latest = self._keeper.latest if self._keeper.is_at_work else None
        if latest is not None:
            verdicts = Counter(row.verdict for row in latest.plan.rows)
            for verdict in Verdict:
                queues.add_metric([verdict], verdicts[verdict])
        events = CounterMetricFamily(
            "popgate_replica_events", "What the replica keeper decided and did", labels=["event", "what"]
        )
        for (event, what), count in list(self._keeper.record.counts.items()):
            events.add_metric([event, what], count)
        yield from (changes, queues, events)


class Metrics:
    """Renders the metrics of one application."""

    def __init__(
        self,
        engine: Engine,
        locks: HostedLocks,
        counters: EventCounters,
        requests: RequestCounts,
        journal: Callable[[], JournalFigures] | None = None,
        keeper: ReplicaKeeper | None = None,
        access: AccessFigures | None = None,
        process: ProcessFigures | None = None,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._registry = CollectorRegistry()
        if journal is not None:
            self._registry.register(JournalCollector(journal))
        self._registry.register(ProxyCollector(engine, counters, requests, process or ProcessFigures()))
        self._registry.register(LockCollector(locks))
        self._registry.register(AccessCollector(access or AccessFigures()))
        if keeper is not None:
            self._registry.register(ReplicaCollector(keeper))
        ProcessCollector(registry=self._registry)

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type: OpenMetrics if the header ``accept`` names it, or otherwise
        Prometheus' text format.

        The values are read at once. A thread writes the text, because thousands of rows would delay other requests.
        """
        families = _Families(list(self._registry.collect()), subscription_figures(self._engine, self._counters))
        is_open = OPEN_METRICS in accept.lower()
        write = _write_open_metrics if is_open else generate_latest
        text: bytes = await asyncio.to_thread(write, families)
        return text, openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_LATEST


class _Families(CollectorRegistry):
    """Values of metrics that have already been read."""

    def __init__(self, families: Sequence[Metric], subscriptions: SubscriptionFigures) -> None:
        super().__init__()
        self._families = families
        self._subscriptions = subscriptions

    def collect(self) -> Iterator[Metric]:
        """See ``CollectorRegistry``."""
        yield from self._families
        yield from self._subscriptions.families()
