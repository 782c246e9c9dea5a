"""Assembles ``popgate doctor``: chooses the interfaces through which it observes RabbitMQ and Redis, according to the
settings of ``popgate serve``."""

import contextlib
import random
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from yarl import URL

from popgate.adapters.doctor.catalog import CatalogQueue, folder_catalog, redis_catalog
from popgate.adapters.doctor.fixing import apply_fix
from popgate.adapters.doctor.observing import Interfaces, Scope, observe
from popgate.adapters.rabbitmq.connection import Connection
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.replicas.management import Management
from popgate.bootstrap import DATABASE_FILE, EMBEDDED
from popgate.bootstrap.replicas import broker_tools
from popgate.config import ServeOptions
from popgate.doctor.examination import examine
from popgate.doctor.facts import Unseen
from popgate.doctor.findings import Examination, Fix, FixResult
from popgate.domain.errors import StartupError
from popgate.runtime.data_folder import bound_broker

DEFAULT_USER = "guest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Examines a broker and applies fixes. ``place`` is the name of the broker that operators see. It contains no
    credentials."""

    place: str
    interfaces: Interfaces
    scope: Scope

    async def examine(self) -> Examination:
        """Return the findings about the broker. Raises: BrokerUnavailable, StateUnavailable."""
        return examine(await observe(self.interfaces, self.scope))

    async def apply_fix(self, fix: Fix) -> FixResult:
        return await apply_fix(fix, self.interfaces.management, self.interfaces.redis)


@contextlib.asynccontextmanager
async def doctor(
    options: ServeOptions, rabbit: RabbitOptions, named: Sequence[str], *, served: Sequence[CatalogQueue] | None = None
) -> AsyncGenerator[Doctor]:
    """Yield a doctor that is connected to RabbitMQ. ``named`` lists additional queues that are checked as if they were
    adopted. ``served`` lists popgate's queues, if the caller knows them: a running proxy locks its data folder.

    Raises: StartupError if RabbitMQ can't be reached; StateUnavailable.
    """
    async with contextlib.AsyncExitStack() as stack:
        connection = Connection(rabbit, "doctor", chance=random.Random())
        stack.push_async_callback(connection.stop)
        await connection.start()
        management = Management(options.management_urls, rabbit.vhost) if options.management_urls else None
        if management is not None:
            stack.push_async_callback(management.close)
        redis: RedisConnection | None = None
        if options.redis_url is not None:
            redis = RedisConnection(parse_address(options.redis_url), options.redis_namespace)
            stack.push_async_callback(redis.close)
        known, unseen = await _catalog(options, redis) if served is None or redis is not None else (served, ())
        yield Doctor(
            place=f"RabbitMQ at {connection.place}, virtual host {rabbit.vhost}",
            interfaces=Interfaces(
                session=connection.session(),
                management=management,
                tools=broker_tools(options.replica_commands),
                redis=redis,
            ),
            scope=Scope(
                vhost=rabbit.vhost,
                user=URL(rabbit.amqp_urls[0]).user or DEFAULT_USER,
                consumer_timeout_seconds=options.consumer_timeout_seconds,
                has_keeper=options.replica_keeper,
                named=named,
                known=known,
                unseen=unseen,
            ),
        )


async def _catalog(
    options: ServeOptions, redis: RedisConnection | None
) -> tuple[Sequence[CatalogQueue], Sequence[Unseen]]:
    """Return the queues in popgate's catalog, and descriptions of what could not be read. Raises: StateUnavailable."""
    if redis is not None:
        return await redis_catalog(redis), ()
    file = options.data_dir / DATABASE_FILE
    try:
        if not file.exists() or bound_broker(options.data_dir) == EMBEDDED:
            return (), ()
        return folder_catalog(file), ()
    except StartupError:
        why = f"a running popgate uses the data folder {options.data_dir}"
    except (sqlite3.Error, OSError) as error:
        why = f"the catalog in {file} can't be read ({error})"
    return (), [Unseen(what="which queues are adopted", why=why, flag="--queue NAME")]
