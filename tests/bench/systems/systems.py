"""The systems that the benchmark compares: how each is driven, what it promises, and why it may be faster.

These texts are printed on the page with the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

BATCH, ONE = 32, 1
PUSHED = "no batches: the broker pushes (prefetch 500), one ack a message"
RABBITMQ_DURABLE = "publishes synced; acks are not confirmed, and written behind"
POPGATE_DURABLE = "each lease and each ack synced before its answer"
PUSH_WHY = (
    "RabbitMQ pushes without being asked, and an ack is a few bytes. There is no HTTP request, and no lease whose end "
    "popgate would have to guarantee: a hung consumer keeps its messages until its channel closes"
)
GET_WHY = "a `basic.get` and its ack are two small frames, without HTTP and without a synced lease"
REDIS_WHY = (
    "Redis runs a batch in one command in C, with all messages in memory. An entry of a consumer group has no "
    "invisibility timeout and no dead letters: consumers claim the entries of a failed one themselves (`XAUTOCLAIM`)"
)
NATS_WHY = "the server is one program in Go that uses all cores, and the acks of a batch need no answer"
POSTGRES_WHY = (
    "its server processes, written in C, use all cores, and popgate's one process uses one core. The client needs SQL, "
    "a table for each queue and vacuum"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system and one way to use it. ``server`` names what is started, and ``client`` the client module.

    ``totals``: number of messages of one drain, by batch size; a system without batches has ``ONE`` only.
    """

    key: str
    name: str
    server: str
    client: str
    library: str
    totals: Mapping[int, int]
    durability: str
    settlement: str
    rival: str = "popgate-embedded"
    """The row of popgate with which the page compares it."""
    why: str = ""
    """Why it is faster, where it is."""
    modules: tuple[str, ...] = field(default=())
    """Client libraries that may be missing."""


def _popgate(key: str, name: str, server: str, client: str, **other: str) -> System:
    return System(
        key=key,
        name=name,
        server=server,
        client=f"popgate_client:{client}",
        library=other.get("library", "a lean HTTP client on asyncio"),
        totals={BATCH: 10_000, ONE: 1_000} if client == "PYTHON_CLIENT" else {BATCH: 30_000, ONE: 4_000},
        durability=POPGATE_DURABLE + (", in SQLite; messages in quorum queues" if server == "popgate-rabbitmq" else ""),
        settlement=other["settlement"],
    )


def _redis(appendfsync: str, durability: str) -> System:
    return System(
        key=f"redis-{appendfsync}",
        name=f"Redis Streams, appendfsync {appendfsync}",
        server=f"redis-{appendfsync}",
        client="redis_client:STREAMS",
        library="redis-py, asyncio",
        totals={BATCH: 30_000, ONE: 6_000},
        durability=durability,
        settlement="XREADGROUP count N, XACK N; entries stay until the stream is trimmed",
        why=REDIS_WHY,
    )


def _nats(key: str, name: str, totals: Mapping[int, int], durability: str) -> System:
    return System(
        key=key,
        name=name,
        server=key,
        client="nats_client:PULL",
        library="nats-py",
        totals=totals,
        durability=durability,
        settlement="fetch N from a work queue on files, one ack a message, not confirmed",
        why=NATS_WHY,
        modules=("nats",),
    )


def _postgres(key: str, name: str, client: str, settlement: str) -> System:
    return System(
        key=key,
        name=name,
        server="postgres",
        client=f"postgres_client:{client}",
        library="asyncpg",
        totals={BATCH: 30_000, ONE: 6_000},
        durability="each commit synced",
        settlement=settlement,
        why=POSTGRES_WHY,
        modules=("asyncpg",),
    )


def _rabbitmq(key: str, name: str, client: str, library: str, total: int, settlement: str, why: str) -> System:
    return System(
        key=key,
        name=name,
        server="rabbitmq",
        client=client,
        library=library,
        totals={ONE: total},
        durability=RABBITMQ_DURABLE,
        settlement=settlement,
        rival="popgate-rabbitmq",
        why=why,
        modules=(library.replace("-", "_"),),
    )


SEPARATE, TOGETHER = "pop N, then ack N", "pop N with the acks of the former pop in the request"
EMPTY, PLAIN, PIKA = "empty", "aio-pika", "pika"
PUSHED_KEYS = (PLAIN, PIKA)
"""Consumers to which RabbitMQ pushes: they are compared with batches."""
ON_RABBITMQ, ON_RABBITMQ_TOGETHER = "popgate-rabbitmq", "popgate-rabbitmq-settle"
EMBEDDED, EMBEDDED_TOGETHER = "popgate-embedded", "popgate-embedded-settle"
GET = "no batches: each `basic.get` returns one message, one ack each"

SYSTEMS = (
    System(
        key=EMPTY,
        name="two empty HTTP requests",
        server="empty",
        client="popgate_client:EMPTY_REQUESTS",
        library="a lean HTTP client on asyncio",
        totals={ONE: 10_000},
        durability="none: an ASGI endpoint under uvicorn that answers a constant",
        settlement="two requests count as one message",
    ),
    _rabbitmq(PLAIN, "aio-pika consumer", "aio_pika_client:CONSUME", "aio-pika", 20_000, PUSHED, PUSH_WHY),
    _rabbitmq(PIKA, "pika consumer", "pika_client:CONSUME", "pika", 20_000, PUSHED, PUSH_WHY),
    _rabbitmq("aio-pika-get", "aio-pika `basic.get`", "aio_pika_client:GET", "aio-pika", 3_000, GET, GET_WHY),
    _rabbitmq("pika-get", "pika `basic.get`", "pika_client:GET", "pika", 4_000, GET, GET_WHY),
    _popgate(ON_RABBITMQ, "popgate on RabbitMQ", ON_RABBITMQ, "POP_AND_ACK", settlement=SEPARATE),
    _popgate(
        ON_RABBITMQ_TOGETHER, "popgate on RabbitMQ, settle on pop", ON_RABBITMQ, "SETTLE_ON_POP", settlement=TOGETHER
    ),
    _popgate(EMBEDDED, "popgate embedded", EMBEDDED, "POP_AND_ACK", settlement=SEPARATE),
    _popgate(EMBEDDED_TOGETHER, "popgate embedded, settle on pop", EMBEDDED, "SETTLE_ON_POP", settlement=TOGETHER),
    _popgate(
        "popgate-embedded-python",
        "popgate embedded, Python client",
        EMBEDDED,
        "PYTHON_CLIENT",
        settlement=SEPARATE,
        library="popgate's AsyncClient",
    ),
    _redis("always", "each write synced before its answer"),
    _redis("everysec", "synced once a second: a power cut takes back the last second"),
    _nats(
        "nats",
        "NATS JetStream",
        {BATCH: 30_000, ONE: 6_000},
        "written, and synced every 2 minutes: a power cut takes back the last 2 minutes",
    ),
    _nats(
        "nats-always",
        "NATS JetStream, sync_interval always",
        {BATCH: 6_000, ONE: 4_000},
        "each write synced",
    ),
    System(
        key="beanstalkd",
        name="beanstalkd",
        server="beanstalkd",
        client="beanstalk_client:RESERVE",
        library="greenstalk",
        totals={ONE: 6_000},
        durability="each write to its log synced (-f0); reservations are kept in memory",
        settlement="no batches: reserve returns one job, one delete each",
        why="one small command to a server in C takes a job, and a reservation is not written to disk",
        modules=("greenstalk",),
    ),
    _postgres(
        "postgres-pgmq",
        "PostgreSQL, leases as pgmq",
        "PGMQ",
        "`for update skip locked` limit N sets a visibility time, then delete N; two commits",
    ),
    _postgres(
        "postgres-transaction",
        "PostgreSQL, one transaction",
        "TRANSACTION",
        "delete N with `skip locked`, commit after the work: the row locks are the leases",
    ),
)
"""All systems, in the order of a round."""


def find_system(key: str) -> System:
    return next(system for system in SYSTEMS if system.key == key)
