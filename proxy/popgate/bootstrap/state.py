"""Assembles the state ports of one store. The store is either the data folder or Redis."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.api.process_metrics import RoundTrip
from popgate.config import ServeOptions
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.ports.assignments import Assignments
from popgate.ports.catalog import Catalog
from popgate.ports.claims import Claims
from popgate.ports.dedup import DedupStore
from popgate.ports.lease_groups import LeaseGroupStore
from popgate.ports.leases import LeaseStore
from popgate.ports.limits import Limits
from popgate.ports.lock_store import LockStore
from popgate.ports.snapshots import Snapshots
from popgate.runtime.background import Background
from popgate.runtime.data_folder import bind_broker, bound_broker, kept_secret
from popgate.runtime.histogram import Histogram
from popgate.runtime.local_address import local_address_towards

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CLUSTER_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state ports of one store.

    ``place`` is the name of the store that operators see. ``bound`` returns the mark of the broker to which the store
    is bound, and ``bind`` sets this mark once. ``cluster`` is the common name of all processes that use the store,
    which stays the same after restarts. ``local_address`` returns the address at which the other processes can
    presumably reach this machine. ``snapshots`` copies the store, and is None if popgate can't back it up.

    If several processes may use the store at the same time, ``claims`` assigns each queue to one owner, ``limits``
    counts the messages in flight at all processes, and ``on_data_loss`` registers a function that is called when the
    store has lost data. All three are None if only one process uses the store.
    """

    place: str
    leases: LeaseStore
    lease_groups: LeaseGroupStore
    assignments: Assignments
    dedup: DedupStore
    catalog: Catalog
    locks: LockStore
    bound: Callable[[], Awaitable[str | None]]
    bind: Callable[[str], Awaitable[None]]
    local_address: Callable[[], Awaitable[str]]
    cluster: str
    snapshots: Snapshots | None = None
    claims: Claims | None = None
    limits: Limits | None = None
    on_data_loss: Callable[[Callable[[], None]], None] | None = None
    round_trips: Mapping[RoundTrip, Histogram] = field(default_factory=dict[RoundTrip, Histogram])
    """How long writes and exchanges took."""


def sqlite_state(options: ServeOptions, database: Database) -> State:
    """Return the state ports of the data folder. Raises: StartupError."""

    async def bound() -> str | None:
        return bound_broker(options.data_dir)

    async def bind(mark: str) -> None:
        bind_broker(options.data_dir, mark)

    async def local_address() -> str:
        return LOOPBACK

    records = LatestRecords()
    return State(
        place=str(options.data_dir),
        leases=SqliteLeaseStore(database, records),
        lease_groups=SqliteLeaseGroups(database, records),
        assignments=SqliteAssignments(database),
        dedup=SqliteDedupStore(database),
        catalog=SqliteCatalog(database),
        locks=SqliteLockStore(database),
        bound=bound,
        bind=bind,
        snapshots=database,
        local_address=local_address,
        cluster=f"alone:{sha256(kept_secret(options.data_dir)).hexdigest()[:CLUSTER_LENGTH]}",
        round_trips={RoundTrip("sqlite", "commit"): database.commit_seconds},
    )


async def redis_state(
    options: ServeOptions, url: str, stack: contextlib.AsyncExitStack, background: Background
) -> State:
    """Return the state ports of Redis. Raises: StartupError."""
    # Slow to load, and not used without Redis.
    from popgate.adapters.redis.address import parse_address
    from popgate.adapters.redis.assignments import RedisAssignments
    from popgate.adapters.redis.catalog import RedisCatalog
    from popgate.adapters.redis.change_signals import listen_for_changes
    from popgate.adapters.redis.claims import RedisClaims
    from popgate.adapters.redis.connection import RedisConnection
    from popgate.adapters.redis.dedup import RedisDedupStore
    from popgate.adapters.redis.lease_groups import RedisLeaseGroups
    from popgate.adapters.redis.leases import RedisLeaseStore
    from popgate.adapters.redis.limits import RedisLimits
    from popgate.adapters.redis.lock_store import RedisLockStore
    from popgate.adapters.redis.startup import left_secret_warnings, startup_warnings

    address = parse_address(url)

    async def local_address() -> str:
        try:
            return LOOPBACK if address.host is None else await local_address_towards(address.host, address.port)
        except OSError as error:
            reason = f"no route to {address.host} ({error.strerror or error})"
            raise StartupError(f"{reason}: give the address of this proxy with --peer-address") from error

    redis = RedisConnection(address, options.redis_namespace)
    stack.push_async_callback(redis.close)
    try:
        for warning in [*await startup_warnings(redis), *await left_secret_warnings(redis, options.secrets)]:
            _log.warning(warning)
        cluster = await redis.cluster()
    except StateUnavailable as error:
        raise StartupError(error.detail) from error
    background.keep(redis.watch, name="watch Redis")
    catalog, claims = RedisCatalog(redis), RedisClaims(redis)
    background.keep(lambda: listen_for_changes(redis, catalog.signal, claims.signal), name="hear of changes in Redis")
    return State(
        place=f"Redis at {redis.place}, namespace {options.redis_namespace},",
        leases=RedisLeaseStore(redis),
        lease_groups=RedisLeaseGroups(redis),
        assignments=RedisAssignments(redis),
        dedup=RedisDedupStore(redis),
        catalog=catalog,
        locks=RedisLockStore(redis),
        bound=redis.bound_broker,
        bind=redis.bind_broker,
        local_address=local_address,
        cluster=cluster,
        claims=claims,
        limits=RedisLimits(redis),
        on_data_loss=redis.on_data_loss,
        round_trips={RoundTrip("redis", "exchange"): redis.exchange_seconds},
    )
