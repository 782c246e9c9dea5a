"""The table of all settings."""

from collections.abc import Sequence

from platformdirs import user_data_path

from popgate.config.http_settings import HTTP_SETTINGS
from popgate.config.quota_settings import QUOTA_SETTINGS
from popgate.config.replica_settings import REPLICA_KEEPER, REPLICA_SETTINGS
from popgate.config.setting import Setting
from popgate.config.values import (
    PORT_MAX,
    amqp_urls,
    feature_names,
    folder_or_url,
    folder_path,
    host_port,
    one_of,
    plain_name,
    redis_url,
    seconds,
    secret_text,
    size_between,
    switch,
    text,
    whole_number,
)
from popgate.domain.features import ALL_FEATURES
from popgate.domain.names import QUEUES_MAX

DEDUP_SECONDS_MAX = 3_600.0
"""Upper bound for dedup_seconds. popgate keeps every settlement of that time, in case its message is published
again."""

WORKERS_MAX = 64
JOURNAL_ROTATE_EVENTS_MAX = 5_000_000
CONSUMER_TIMEOUT_SECONDS_MAX = 366 * 86_400.0


SETTINGS: Sequence[Setting] = (
    Setting(name="host", help="address to listen on", parse=text, default="127.0.0.1", metavar="ADDRESS"),
    Setting(name="port", help="port to listen on", parse=whole_number(1, PORT_MAX), default=8080, metavar="PORT"),
    *HTTP_SETTINGS,
    Setting(
        name="workers",
        help="processes behind one port, each a proxy of the cluster; more than 1 requires --amqp-url and --redis-url",
        parse=whole_number(1, WORKERS_MAX),
        default=1,
        metavar="NUMBER",
    ),
    Setting(
        name="data_dir",
        help="folder for all durable data",
        parse=folder_path,
        default=user_data_path("popgate"),
        default_text="the platform's data folder for popgate",
        metavar="FOLDER",
    ),
    Setting(
        name="amqp_url",
        help=(
            "RabbitMQ to use: one URL, or the URLs of its cluster's nodes with commas between them, the preferred "
            "one first; without it the embedded broker is used"
        ),
        parse=amqp_urls,
        default=(),
        default_text="embedded broker",
        metavar="URLS",
        option="amqp_urls",
    ),
    Setting(
        name="amqp_heartbeat_seconds",
        help="AMQP heartbeat interval: how fast a dead connection is noticed",
        parse=whole_number(1, 600),
        default=5,
        metavar="SECONDS",
    ),
    Setting(
        name="confirm_timeout_seconds",
        help="how long a publish waits for RabbitMQ's confirm",
        parse=seconds(1, 600),
        default=15.0,
        metavar="SECONDS",
    ),
    Setting(
        name="consumer_timeout_seconds",
        help=(
            "RabbitMQ's consumer_timeout: after half of it, popgate returns leased messages to RabbitMQ and consumes "
            "them again (quorum queues: before 4.3)"
        ),
        parse=seconds(1, CONSUMER_TIMEOUT_SECONDS_MAX),
        default=1_800.0,
        metavar="SECONDS",
    ),
    Setting(
        name="redis_url",
        help="Redis that keeps the state in place of the data folder; needs --amqp-url",
        parse=redis_url,
        default=None,
        default_text="the data folder",
        metavar="URL",
    ),
    Setting(
        name="redis_namespace",
        help="separates several popgates in one Redis",
        parse=plain_name,
        default="default",
        metavar="NAME",
    ),
    Setting(
        name="peer_address",
        help=(
            "address at which the other proxies on the same Redis reach this one; port 0 takes any free port, and "
            "each further worker takes the next port"
        ),
        parse=host_port,
        default=None,
        default_text="the local address that leads to Redis, any free port",
        metavar="HOST:PORT",
    ),
    Setting(
        name="owns_queues",
        help="whether this proxy owns queues; if not, it only passes requests on to the others",
        parse=switch,
        default=True,
        default_text="true",
        metavar="BOOL",
    ),
    Setting(
        name="auto_create",
        help="create unknown topics on publish, and unknown groups on pop",
        parse=switch,
        default=None,
        default_text="true when embedded, false on RabbitMQ",
        metavar="BOOL",
    ),
    Setting(
        name="auto_create_queues",
        help="number of queues of an automatically created topic",
        parse=whole_number(1, QUEUES_MAX),
        default=4,
        metavar="NUMBER",
    ),
    Setting(
        name="buffer_bytes_max",
        help="memory for messages held by the proxy: their bodies, plus 1 KiB each",
        parse=size_between(1 << 20, 1 << 50),
        default=256 << 20,
        default_text="256MiB",
        metavar="SIZE",
    ),
    Setting(
        name="idle_return_seconds",
        help="time without a pop after which buffered messages go back to the broker",
        parse=seconds(0.1, 86_400),
        default=30.0,
        metavar="SECONDS",
    ),
    Setting(
        name="dedup_seconds",
        help="how long a dedup_id is remembered, so that it is published once; must be the same on every proxy",
        parse=seconds(1, DEDUP_SECONDS_MAX),
        default=300.0,
        metavar="SECONDS",
    ),
    Setting(
        name="lease_group_seconds_max",
        help="how long a lease group may hold its messages without a break, however often it is extended",
        parse=seconds(1, 30 * 86_400),
        default=43_200.0,
        metavar="SECONDS",
    ),
    Setting(
        name="pull_session_seconds",
        help=(
            "how long a pull client may be silent before its queues go to other clients; clients are told to send a "
            "heartbeat after a third of it"
        ),
        parse=seconds(1, 3_600),
        default=10.0,
        metavar="SECONDS",
    ),
    *QUOTA_SETTINGS,
    REPLICA_KEEPER,
    *REPLICA_SETTINGS,
    Setting(
        name="journal",
        help=(
            "folder, or URL such as s3://bucket/folder, for the journal of delivery events as Parquet files; needs "
            "the extra popgate[journal]"
        ),
        parse=folder_or_url,
        default=None,
        default_text="no journal is written",
        metavar="PLACE",
    ),
    Setting(
        name="journal_rotate_seconds",
        help="a journal file is finished this long after its first event, or at the end of the hour",
        parse=seconds(1, 86_400),
        default=60.0,
        metavar="SECONDS",
    ),
    Setting(
        name="journal_rotate_events",
        help=(
            "maximum number of events in a journal file; twice as many, and at least 100,000, may wait in memory for "
            "a full or slow disk before events are dropped"
        ),
        parse=whole_number(1, JOURNAL_ROTATE_EVENTS_MAX),
        default=200_000,
        metavar="NUMBER",
    ),
    Setting(
        name="features",
        help=(
            "features that clients may use: names from GET /v1 with commas between them. Without pop, this proxy "
            "acts like an old one that supports only pull"
        ),
        parse=feature_names,
        default=frozenset(ALL_FEATURES),
        default_text="all",
        metavar="LIST",
    ),
    Setting(
        name="secret",
        help=(
            "signs receipt handles, and authenticates proxies to each other; must be the same on every proxy (prefer "
            "POPGATE_SECRET to the flag)"
        ),
        parse=secret_text,
        default=None,
        default_text="generated into the data folder, or into Redis, where all proxies find it",
        metavar="TEXT",
    ),
    Setting(
        name="former_secret",
        help=(
            "the previous --secret: messages that were published with it keep their identity. Remove it once these "
            "are consumed"
        ),
        parse=secret_text,
        default=None,
        default_text="none",
        metavar="TEXT",
    ),
    Setting(
        name="accept_untagged",
        help=(
            "accept copy ids on RabbitMQ that have no identity tag: for an upgrade from a popgate that wrote none, "
            "until its messages are consumed. Meanwhile, a publisher can pretend to be popgate"
        ),
        parse=switch,
        default=False,
        default_text="false",
        metavar="BOOL",
    ),
    Setting(
        name="log_level",
        help="debug, info, warning or error",
        parse=one_of("debug", "info", "warning", "error"),
        default="info",
        metavar="LEVEL",
    ),
)
