"""A started embedded broker for tests, with the database under it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contract.recorder import Recorder, declare, layout
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.database import Database
from popgate.domain.names import BrokerQueue
from popgate.ports.broker import Channel
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import opened

BILLING = layout("billing")
QUEUE = BILLING.queues[0]


class Store:
    """A started broker and the database under it."""

    def __init__(self, database: Database, broker: SqliteBroker) -> None:
        self.database = database
        self.broker = broker

    async def fail(self, *, failing: bool) -> None:
        """Make every write fail from now on, as on a disk that became read-only; or stop doing so."""
        await self.database.read(lambda c: c.execute(f"PRAGMA query_only = {int(failing)}").fetchall())

    async def ready(self, queue: BrokerQueue = QUEUE) -> int | None:
        (depth,) = await self.broker.depth([queue])
        return depth.ready

    async def consume(self, prefetch: int, listener: Recorder) -> Channel:
        return await self.broker.consume(QUEUE, BILLING, prefetch, listener)

    async def stored(self) -> int:
        """Return the rows of messages, including those of deleted queues."""
        count: int = await self.database.read(lambda c: c.execute("SELECT count(*) FROM message").fetchone()[0])
        return count


@asynccontextmanager
async def started(folder: Path, clock: ManualClock | None = None) -> AsyncGenerator[Store]:
    async with opened(folder, clock) as database:
        broker = SqliteBroker(database)
        await broker.start()
        try:
            yield Store(database, broker)
        finally:
            await broker.stop()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    async with started(tmp_path) as store:
        await declare(store.broker, BILLING)
        yield store
