"""Serves /metrics: counters and gauges of the process in Prometheus' text format.

The values are read from the event counters, the engine and the locks at each scrape, so no value is stored twice. Each
application has its own registry, so that two applications in one process don't conflict.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from popgate import __version__
from popgate.api.asked import query_values
from popgate.api.problems import ProxyNotFound
from popgate.domain.names import InstanceId, Subscription
from popgate.domain.replica_plan import Verdict
from popgate.engine.engine import Engine, SubscriptionGauges
from popgate.journal.counters import OTHER, EventCounters
from popgate.journal.figures import JournalFigures
from popgate.locks.hosted import HostedLocks
from popgate.ports.journal import TOPIC_EVENTS
from popgate.replicas.keeper import ReplicaKeeper

CONTENT_TYPE = CONTENT_TYPE_LATEST
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


class RequestCounts:
    """Counts answered requests by operation and status. ``connections`` returns the number of client connections."""

    __slots__ = ("connections", "counts")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}
        self.connections: Callable[[], int] = lambda: 0

    def count(self, operation: str, status: int) -> None:
        key = (operation, status)
        self.counts[key] = self.counts.get(key, 0) + 1


class EngineCollector(Collector):
    """Metrics of the engine, read at scrape time."""

    def __init__(self, engine: Engine, counters: EventCounters, requests: RequestCounts) -> None:
        self._engine = engine
        self._counters = counters
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "popgate_build_info", "The version and the broker, as labels", labels=["version", "broker"]
        )
        build.add_metric([__version__, self._engine.capabilities.name], 1)
        yield build
        yield from self._counted()
        yield from self._measured()

    def _counted(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "popgate_events", "Delivery events; those of publishers carry no group", labels=["kind", "topic", "group"]
        )
        topics = self._engine.topics
        self._counters.keep(topics.specs, topics.served)
        for (kind, (topic, group)), count in list(self._counters.counts.items()):
            events.add_metric([kind, topic, "" if kind in TOPIC_EVENTS else group], count)
        yield events
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

    def _measured(self) -> Iterator[Metric]:
        def gauge(name: str, documentation: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, documentation, labels=["topic", "group"])

        ready = gauge("popgate_ready_buffered", "Messages in this process that the next pop may take")
        in_flight = gauge("popgate_in_flight", "Leased messages of the queues that this proxy owns")
        delayed = gauge("popgate_delayed", "Messages that wait for their retry")
        blocked = gauge("popgate_blocked", "Messages here that wait behind an earlier one of their ordering key")
        held_bytes = gauge("popgate_buffer_bytes", "Memory of the messages whose bodies are in this process")
        parked = gauge("popgate_parked_pops", "Pops that wait for a message")
        stuck = gauge("popgate_stuck", "Messages that not even the dead letters take, because popgate fails on them")
        oldest_lease = gauge(
            "popgate_oldest_lease_age_seconds", "How long ago the oldest lease was given; 0 where nothing is leased"
        )
        for one in self._named_gauges():
            labels = [one.topic, one.group]
            ready.add_metric(labels, one.ready_buffered)
            in_flight.add_metric(labels, one.in_flight)
            delayed.add_metric(labels, one.delayed)
            blocked.add_metric(labels, one.blocked)
            held_bytes.add_metric(labels, one.buffer_bytes)
            parked.add_metric(labels, one.parked_pops)
            stuck.add_metric(labels, one.stuck)
            oldest_lease.add_metric(labels, one.oldest_lease_age_seconds)
        yield from (ready, in_flight, delayed, blocked, held_bytes, parked, stuck, oldest_lease)

    def _named_gauges(self) -> Iterator[SubscriptionGauges]:
        """Yield the gauges of each group that has its own labels, and then the sum of the gauges of all other
        groups."""
        others: SubscriptionGauges | None = None
        for one in self._engine.gauges():
            if self._counters.named(Subscription(one.topic, one.group)) != OTHER:
                yield one
            else:
                others = one if others is None else others.with_other(one)
        if others is not None:
            yield others._replace(topic=OTHER.topic, group=OTHER.group)


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
    TLS. The functions are None if there is no keys file, no TLS, and no audit log, respectively."""

    is_insecure: bool = False
    keys_are_stale: Callable[[], bool] | None = None
    tls_is_stale: Callable[[], bool] | None = None
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
    ) -> None:
        self._registry = CollectorRegistry()
        if journal is not None:
            self._registry.register(JournalCollector(journal))
        self._registry.register(EngineCollector(engine, counters, requests))
        self._registry.register(LockCollector(locks))
        self._registry.register(AccessCollector(access or AccessFigures()))
        if keeper is not None:
            self._registry.register(ReplicaCollector(keeper))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)
