"""Opens a store of the state port on each kind of storage: SQLite, a real Redis, and Redis in memory."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.sqlite.database import Database
from popgate.runtime.clocks import SystemClock
from simulator.direct import memory_connection
from simulator.redis_memory import MemoryRedis
from support.redis import RedisServer

T = TypeVar("T")
OpenerOf: TypeAlias = Callable[[Path], AbstractAsyncContextManager[T]]
"""Opens the store in a folder. Opened again there, it has what was written before."""


def store_opener(
    request: pytest.FixtureRequest,
    on_sqlite: Callable[[Database], T],
    on_redis: Callable[[RedisConnection], T],
    *,
    redis_database: int,
) -> OpenerOf[T]:
    """Return the opener for the fixture's parameter: ``sqlite``, ``redis`` or ``simulated``."""

    @asynccontextmanager
    async def sqlite(folder: Path) -> AsyncGenerator[T]:
        database = Database(folder / "popgate.db", SystemClock())
        await database.open()
        try:
            yield on_sqlite(database)
        finally:
            await database.close()

    if request.param == "sqlite":
        return sqlite
    if request.param == "simulated":
        memory = MemoryRedis(time.time)

        @asynccontextmanager
        async def simulated(folder: Path) -> AsyncGenerator[T]:
            yield on_redis(memory_connection(memory, folder.name))

        return simulated
    server: RedisServer = request.getfixturevalue("redis_server")

    @asynccontextmanager
    async def redis(folder: Path) -> AsyncGenerator[T]:
        connection = RedisConnection(parse_address(server.url(redis_database)), namespace=folder.name)
        try:
            yield on_redis(connection)
        finally:
            await connection.close()

    return redis
