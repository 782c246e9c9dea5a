"""The state ports, all on one store: the data folder's, or Redis."""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.config import ServeOptions
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.ports.catalog import Catalog
from popgate.ports.dedup import DedupStore
from popgate.ports.lease_groups import LeaseGroupStore
from popgate.ports.leases import LeaseStore
from popgate.ports.lock_store import LockStore
from popgate.runtime.background import Background
from popgate.runtime.data_folder import bind_broker, bound_broker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state ports on one store. ``place`` names it to operators; ``bound`` is which broker its records speak of,
    and ``bind`` says so, once."""

    place: str
    leases: LeaseStore
    lease_groups: LeaseGroupStore
    dedup: DedupStore
    catalog: Catalog
    locks: LockStore
    bound: Callable[[], Awaitable[str | None]]
    bind: Callable[[str], Awaitable[None]]


def sqlite_state(options: ServeOptions, database: Database) -> State:
    async def bound() -> str | None:
        return bound_broker(options.data_dir)

    async def bind(mark: str) -> None:
        bind_broker(options.data_dir, mark)

    records = LatestRecords()
    return State(
        place=str(options.data_dir),
        leases=SqliteLeaseStore(database, records),
        lease_groups=SqliteLeaseGroups(database, records),
        dedup=SqliteDedupStore(database),
        catalog=SqliteCatalog(database),
        locks=SqliteLockStore(database),
        bound=bound,
        bind=bind,
    )


async def redis_state(
    options: ServeOptions, url: str, stack: contextlib.AsyncExitStack, background: Background
) -> State:
    """Raises: StartupError."""
    # Slow to load, and not used without it.
    from popgate.adapters.redis.address import parse_address
    from popgate.adapters.redis.catalog import RedisCatalog
    from popgate.adapters.redis.connection import RedisConnection
    from popgate.adapters.redis.dedup import RedisDedupStore
    from popgate.adapters.redis.lease_groups import RedisLeaseGroups
    from popgate.adapters.redis.leases import RedisLeaseStore
    from popgate.adapters.redis.lock_store import RedisLockStore
    from popgate.adapters.redis.startup import startup_warnings

    redis = RedisConnection(parse_address(url), options.redis_namespace)
    stack.push_async_callback(redis.close)
    try:
        for warning in await startup_warnings(redis):
            _log.warning(warning)
    except StateUnavailable as error:
        raise StartupError(error.detail) from error
    background.spawn(redis.watch(), name="watch Redis")
    return State(
        place=f"Redis at {redis.place}, namespace {options.redis_namespace},",
        leases=RedisLeaseStore(redis),
        lease_groups=RedisLeaseGroups(redis),
        dedup=RedisDedupStore(redis),
        catalog=RedisCatalog(redis),
        locks=RedisLockStore(redis),
        bound=redis.bound_broker,
        bind=redis.bind_broker,
    )
