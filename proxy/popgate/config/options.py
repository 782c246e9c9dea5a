"""Defines the settings of popgate.

Each setting is a field of ``ServeOptions`` with help, parser, default and bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from popgate.config import replica_values, values
from popgate.config.security_options import SecurityOptions
from popgate.config.setting import Setting, setting
from popgate.config.values import PORT_MAX, HostPort
from popgate.domain import quotas
from popgate.domain.features import ALL_FEATURES, Feature
from popgate.domain.message import HEADERS_BYTES_MAX
from popgate.domain.names import QUEUES_MAX
from popgate.domain.quotas import DEFAULTS, Quotas
from popgate.domain.replica_plan import ReplicaLimits
from popgate.domain.replica_wanted import REPLICAS_MAX, ReplicaPolicy
from popgate.runtime.event_loop import ASYNCIO, AUTO, UVLOOP

BUILT_IN_PLACEMENT = "spread"
CONSUMER_TIMEOUT_SECONDS_MAX = 366 * 86_400.0
DAY = 86_400.0
DEDUP_SECONDS_MAX = 3_600.0
"""Maximum value of the setting dedup_seconds. popgate stores the records of all settlements for that time, because a
settled message may be published a second time."""
JOURNAL_ROTATE_EVENTS_MAX = 5_000_000
WORKERS_MAX = 64

_LIMITS = ReplicaLimits()


def _number(help: str, default: int, bounds: tuple[int, int], *, metavar: str = "NUMBER") -> Any:
    return setting(help, values.whole_number(*bounds), default, metavar)


def _seconds(help: str, default: float | None, bounds: tuple[float, float], *, default_text: str = "") -> Any:
    return setting(help, values.seconds(*bounds), default, "SECONDS", default_text=default_text)


def _size(help: str, default: int, bounds: tuple[int, int]) -> Any:
    parse = values.size_between(*bounds)
    return setting(help, parse, default, "SIZE", default_text=values.shown_size(default))


def _switch(help: str, *, default: bool | None, default_text: str = "") -> Any:
    return setting(help, values.switch, default, "BOOL", default_text=default_text or str(default).lower())


def _instead_of(flag: str) -> str:
    """Return the help of the setting that names a file with the value of ``flag``."""
    return f"file with the value of {flag}, in its place: so its password is neither in a flag nor in a variable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(SecurityOptions):
    """The checked options of ``popgate serve``."""

    host: str = setting("address to listen on", values.text, "127.0.0.1", "ADDRESS")
    port: int = _number("port to listen on", 8080, (1, PORT_MAX), metavar="PORT")
    allowed_hosts: frozenset[str] = setting(
        "host names under which clients may address the proxy, with commas between them, besides localhost "
        "and IP addresses; * allows any name",
        values.host_names,
        None,
        "NAMES",
        default_text="*, or none if --host is a loopback address",
    )
    """Host names by which clients may address the proxy, in addition to localhost and IP addresses. ``*`` allows any
    name."""
    connections_max: int = _number(
        "maximum number of client connections in each process; at most three quarters of the files that it "
        "may have open (ulimit -Hn)",
        20_000,
        (1, 1_000_000),
    )
    connection_idle_seconds: float = _seconds(
        "time after which a connection is closed if it is idle, or if its client reads nothing of an answer",
        75.0,
        (1, 3_600),
    )
    head_bytes_max: int = _size("maximum size of a request's first line and headers", 32 << 10, (1 << 10, 1 << 20))
    head_fields_max: int = _number("maximum number of headers of a request", 100, (10, 10_000))
    path_bytes_max: int = _size("maximum size of a request's path with its query", 8 << 10, (512, 1 << 20))
    head_seconds: float = _seconds(
        "time for a request's first line and headers to arrive, from their first byte on", 10.0, (0.5, 600)
    )
    body_bytes_per_second_min: int = _number(
        "minimum average bytes per second at which a body must arrive, after its first --head-seconds",
        1 << 10,
        (1, 1 << 30),
    )
    bodies_bytes_max: int = _size(
        "memory of each process for large requests that are not answered yet, and for answers that are not read",
        256 << 20,
        (64 << 20, 1 << 40),
    )
    parked_pops_max: int = _number(
        ("maximum number of pops that wait for a message in each process; at most three quarters of its connections"),
        20_000,
        (1, 1_000_000),
    )
    parked_pops_per_group_max: int = _number(
        "maximum number of pops that wait for a message of one group in each process", 15_000, (1, 1_000_000)
    )
    workers: int = _number(
        ("processes behind one port, each a proxy of the cluster; more than 1 requires --amqp-url and --redis-url"),
        1,
        (1, WORKERS_MAX),
    )
    event_loop: str = setting(
        "auto, asyncio or uvloop: auto is uvloop where it is installed (the extra popgate[fast]), which needs less "
        "processor time",
        values.one_of(AUTO, ASYNCIO, UVLOOP),
        AUTO,
        "NAME",
    )
    data_dir: Path = setting(
        "folder for all durable data",
        values.folder_path,
        user_data_path("popgate"),
        "FOLDER",
        default_text="the platform's data folder for popgate",
    )
    amqp_urls: tuple[str, ...] = setting(
        "RabbitMQ to use: one URL, or the URLs of its cluster's nodes with commas between them, the "
        "preferred one first; without it the embedded broker is used",
        values.amqp_urls,
        (),
        "URLS",
        default_text="embedded broker",
        name="amqp_url",
        hidden=True,
    )
    """URLs of the nodes of one RabbitMQ cluster. If this is empty, popgate uses the embedded broker."""
    amqp_url_file: Path | None = setting(_instead_of("--amqp-url"), values.file_path, None, "FILE", default_text="none")
    amqp_heartbeat_seconds: int = _number(
        "AMQP heartbeat interval: how fast a dead connection is noticed", 5, (1, 600), metavar="SECONDS"
    )
    confirm_timeout_seconds: float = _seconds("how long a publish waits for RabbitMQ's confirm", 15.0, (1, 600))
    consumer_timeout_seconds: float = _seconds(
        "RabbitMQ's consumer_timeout: after half of it, popgate returns leased messages to RabbitMQ and "
        "consumes them again (quorum queues: before 4.3)",
        1_800.0,
        (1, CONSUMER_TIMEOUT_SECONDS_MAX),
    )
    redis_url: str | None = setting(
        "Redis that keeps the state in place of the data folder; needs --amqp-url",
        values.redis_url,
        None,
        "URL",
        default_text="the data folder",
        hidden=True,
    )
    redis_url_file: Path | None = setting(
        _instead_of("--redis-url"), values.file_path, None, "FILE", default_text="none"
    )
    redis_namespace: str = setting("separates several popgates in one Redis", values.plain_name, "default", "NAME")
    peer_address: HostPort | None = setting(
        "address at which the other proxies on the same Redis reach this one; port 0 takes any free port, "
        "and each further worker takes the next port",
        values.host_port,
        None,
        "HOST:PORT",
        default_text="the local address that leads to Redis, any free port",
    )
    owns_queues: bool = _switch(
        "whether this proxy owns queues; if not, it only passes requests on to the others", default=True
    )
    auto_create: bool = _switch(
        "create unknown topics on publish, and unknown groups on pop",
        default=None,
        default_text="true when embedded, false on RabbitMQ",
    )
    auto_create_queues: int = _number("number of queues of an automatically created topic", 4, (1, QUEUES_MAX))
    buffer_bytes_max: int = _size(
        "memory for messages held by the proxy: their bodies, plus 1 KiB each", 256 << 20, (1 << 20, 1 << 50)
    )
    idle_return_seconds: float = _seconds(
        "time without a pop after which buffered messages go back to the broker", 30.0, (0.1, 86_400)
    )
    dedup_seconds: float = _seconds(
        "how long a dedup_id is remembered, so that it is published once; must be the same on every proxy",
        300.0,
        (1, DEDUP_SECONDS_MAX),
    )
    lease_group_seconds_max: float = _seconds(
        "how long a lease group may hold its messages without a break, however often it is extended",
        43_200.0,
        (1, 30 * 86_400),
    )
    pull_session_seconds: float = _seconds(
        "how long a pull client may be silent before its queues go to other clients; clients are told to "
        "send a heartbeat after a third of it",
        10.0,
        (1, 3_600),
    )
    topics_max: int = _number("maximum number of topics", DEFAULTS.topics_max, (1, quotas.TOPICS_MAX))
    groups_per_topic_max: int = _number(
        "maximum number of groups of a topic", DEFAULTS.groups_per_topic_max, (1, quotas.GROUPS_PER_TOPIC_MAX)
    )
    queues_max: int = _number(
        "maximum number of queues of all groups of all topics together, without their dead-letter queues",
        DEFAULTS.queues_max,
        (1, quotas.QUEUES_MAX),
    )
    locks_max: int = _number("maximum number of locks", DEFAULTS.locks_max, (1, quotas.LOCKS_MAX))
    lease_groups_max: int = _number(
        "maximum number of unacked lease groups of a group", DEFAULTS.lease_groups_max, (1, quotas.LEASE_GROUPS_MAX)
    )
    headers_max: int = _number(
        "maximum number of headers of a published message", DEFAULTS.headers_max, (1, quotas.HEADERS_MAX)
    )
    headers_bytes_max: int = _size(
        "maximum size of all headers of a published message together",
        DEFAULTS.headers_bytes_max,
        (quotas.HEADERS_BYTES_MIN, HEADERS_BYTES_MAX),
    )
    filter_bytes_max: int = _size(
        "maximum size of a pop's filter, names and values together",
        DEFAULTS.filter_bytes_max,
        (quotas.FILTER_BYTES_MIN, quotas.FILTER_BYTES_MAX),
    )
    metrics_groups_max: int = _number(
        "maximum number of groups with their own rows in /metrics; all others share rows",
        DEFAULTS.metrics_groups_max,
        (1, quotas.METRICS_GROUPS_MAX),
    )
    metrics_read_seconds: float = _seconds(
        "minimum time between two readings of the backlogs for /metrics; many queues are read less often",
        5.0,
        (0.1, 3_600),
    )
    replica_keeper: bool = _switch(
        "keep a minimum number of replicas of all quorum queues and streams; one keeper of each virtual host is active",
        default=False,
    )
    management_urls: tuple[str, ...] = setting(
        ("RabbitMQ's management API, with credentials: one URL, or the URLs of several nodes with commas between them"),
        replica_values.management_urls,
        (),
        "URLS",
        default_text="port 15672 (TLS: 15671) of the hosts of --amqp-url",
        name="management_url",
        hidden=True,
    )
    management_url_file: Path | None = setting(
        _instead_of("--management-url"), values.file_path, None, "FILE", default_text="none"
    )
    policy_check_seconds: float = _seconds(
        "how often to check, through the management API, for policies that drop or move messages of "
        "popgate's queues, and warn; 0: never",
        60.0,
        (0, 86_400),
    )
    """Seconds between two checks of the policies. 0 disables the checks."""
    replica_commands: tuple[str, ...] | None = setting(
        "how to run RabbitMQ's command line tools: words to put before them, such as 'ssh rabbit-1', with "
        "commas between alternatives; or local, or none",
        replica_values.tool_prefixes,
        None,
        "WORDS",
        default_text="local, if they are installed",
    )
    """Alternative prefixes for the commands of RabbitMQ's tools. An empty prefix runs the tools on this machine. If the
    option is an empty tuple, the tools are not used. If it is None, the tools on this machine are used if they are
    installed."""
    min_replicas: int = _number(
        "minimum number of replicas of queues for which no argument and no policy sets it; 0: leave such queues alone",
        3,
        (0, REPLICAS_MAX),
    )
    replica_policies: tuple[ReplicaPolicy, ...] = setting(
        "replicas by queue name: PATTERN=NUMBER with commas between them; * matches anything, and the most "
        "specific pattern applies",
        replica_values.replica_policies,
        (),
        "LIST",
        default_text="none",
    )
    replica_groups_urls: tuple[str, ...] = setting(
        "for popgate replicas: the URL of a proxy that knows the groups' min_replicas, or several with "
        "commas between them; a proxy's own keeper does not need it",
        replica_values.proxy_urls,
        (),
        "URLS",
        default_text="none: the groups' min_replicas are ignored",
        name="replica_groups_url",
        hidden=True,
    )
    replica_zones: tuple[tuple[str, str], ...] = setting(
        "the zones over which replicas are spread: NODE=ZONE with commas between them",
        replica_values.node_zones,
        (),
        "LIST",
        default_text="the nodes' tag zone (RabbitMQ 4)",
    )
    replica_placement: str = setting(
        "which node gets a new replica: spread, or the name of an entry point of the group popgate.placement",
        replica_values.entry_point_name,
        BUILT_IN_PLACEMENT,
        "NAME",
    )
    replica_check_interval_seconds: float = _seconds("how often each queue is checked", 30.0, (1, DAY))
    replica_recovery_interval_seconds: float = _seconds(
        "how long a queue must have lacked replicas before the keeper adds one",
        _LIMITS.recovery_interval_seconds,
        (0, 30 * DAY),
    )
    replica_forget_after_seconds: float | None = _seconds(
        "remove the replica on a node that has been down for this long, once it is replaced",
        None,
        (1, 365 * DAY),
        default_text="never, unless the node is removed from the cluster",
    )
    replica_changes_max: int = _number(
        "maximum number of queues that are changed at a time", _LIMITS.changes_max, (1, 100)
    )
    replica_changes_per_node_max: int = _number(
        "maximum number of these changes on one node", _LIMITS.changes_per_node_max, (1, 100)
    )
    replica_stall_messages_max: int = _number(
        ("maximum backlog, in messages, of a queue that accepts no messages until its new replica has copied it"),
        _LIMITS.stall_messages_max,
        (0, 10**12),
    )
    replica_move_leaders: bool = _switch(
        "move the leader of a quorum queue to the node to which its active consumer is connected, if it has "
        "a replica there (RabbitMQ 4.2.9, 4.3.3 and newer)",
        default=False,
    )
    replica_allow_stall: bool = _switch(
        ("also add replicas to queues with a larger backlog, although nothing can be published to them meanwhile"),
        default=False,
    )
    journal: str | None = setting(
        "folder, or URL such as s3://bucket/folder, for the journal of delivery events as Parquet files; "
        "needs the extra popgate[journal]",
        values.folder_or_url,
        None,
        "PLACE",
        default_text="no journal is written",
        hidden=True,
    )
    """The folder or URL to which the journal is written. If this is None, no journal is written."""
    journal_rotate_seconds: float = _seconds(
        "a journal file is finished this long after its first event, or at the end of the hour", 60.0, (1, 86_400)
    )
    journal_rotate_events: int = _number(
        "maximum number of events in a journal file; twice as many, and at least 100,000, may wait in "
        "memory for a full or slow disk before events are dropped",
        200_000,
        (1, JOURNAL_ROTATE_EVENTS_MAX),
    )
    report_folder: Path | None = setting(
        "folder into which popgate-pipeline writes its reports; the console shows them",
        values.folder_path,
        None,
        "FOLDER",
        default_text="no reports are shown",
    )
    """The folder with the reports that this proxy shows, or None."""
    features: frozenset[Feature] = setting(
        "features that clients may use: names from GET /v1 with commas between them. Without pop, this "
        "proxy acts like an old one that supports only pull",
        values.feature_names,
        frozenset(ALL_FEATURES),
        "LIST",
        default_text="all",
    )
    """Features that clients may use. Clients can't use a feature that is not in this set."""

    @property
    def quotas(self) -> Quotas:
        return Quotas(**{quota.name: getattr(self, quota.name) for quota in fields(Quotas)})


def _settings() -> Sequence[Setting]:
    """Return the settings in the order in which the help shows them: those of logs and security are the last."""
    later = {field.name for field in fields(SecurityOptions)}
    ordered = sorted(fields(ServeOptions), key=lambda field: field.name in later)
    return tuple(Setting.of(field) for field in ordered if field.metadata)


SETTINGS: Sequence[Setting] = _settings()
URL_SETTINGS = ("amqp_url", "redis_url", "management_url")
"""Names of the settings that a file can contain, which the setting with ``_file`` after this name names."""
REPLICA_SETTINGS: Sequence[Setting] = tuple(
    one
    for one in SETTINGS
    if one.name in ("management_url", "management_url_file", "policy_check_seconds", "min_replicas")
    or (one.name.startswith("replica_") and one.name != "replica_keeper")
)
"""The settings of a replica keeper. They apply to a keeper in a proxy and to the keeper of ``popgate replicas``."""
