"""What the embedded store keeps of clients' attempts, and how long."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from popgate.adapters.sqlite import attempts
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.lease import SettleAction
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import WAIT_SECONDS, opened

QUEUE = BrokerQueue("q")
COPY = CopyId("copy")
FIRST, SECOND = LeaseId("first"), LeaseId("second")
LONG_AGO = 1_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def database(tmp_path: Path, clock: ManualClock) -> AsyncGenerator[Database]:
    async with opened(tmp_path, clock=clock) as database:
        yield database


async def popped(
    database: Database, lease_id: LeaseId, attempt_id: str | None, copy_id: CopyId = COPY, seconds: float = 10.0
) -> SqliteLeaseStore:
    """Return a store in which the copy is leased for ``seconds``."""
    store = SqliteLeaseStore(database)
    await store.grant(
        GrantRequest(
            subscription=Subscription(TopicName("t"), GroupName("g")),
            lease_id=lease_id,
            entries=[GrantEntry(QUEUE, 1, copy_id, 0)],
            invisibility_seconds=seconds,
            max_deliveries=None,
            mode_generation=1,
            attempt_id=attempt_id,
        )
    )
    return store


async def kept(database: Database) -> list[str]:
    def job(connection: sqlite3.Connection) -> list[str]:
        return [
            attempt_id for (attempt_id,) in connection.execute("SELECT attempt_id FROM attempt ORDER BY attempt_id")
        ]

    return await database.read(job)


@pytest.mark.parametrize("action", [SettleAction.ACK, SettleAction.RELEASE, SettleAction.MOVE])
async def test_an_attempt_is_forgotten_once_its_lease_was_settled_or_given_back(
    database: Database, clock: ManualClock, action: SettleAction
) -> None:
    store = await popped(database, FIRST, "try")
    await store.settle([SettleEntry(QUEUE, COPY, FIRST, action)])
    clock.advance(11.0)
    await store.collect(older_than_seconds=LONG_AGO)
    assert await kept(database) == []


async def test_an_attempt_with_a_long_lease_is_forgotten_soon_after_the_release(
    database: Database, clock: ManualClock
) -> None:
    await popped(database, FIRST, "held", CopyId("held"), 43_200.0)
    store = await popped(database, FIRST, "released", seconds=43_200.0)
    await store.settle([SettleEntry(QUEUE, COPY, FIRST, SettleAction.RELEASE)])
    clock.advance(attempts.LOOK_AGAIN_SECONDS + 1.0)
    await store.collect(older_than_seconds=LONG_AGO)
    assert await kept(database) == ["held"]


async def test_an_attempt_is_forgotten_soon_after_somebody_else_got_its_message(
    database: Database, clock: ManualClock
) -> None:
    store = await popped(database, FIRST, "try")
    clock.advance(11.0)
    await store.collect(older_than_seconds=LONG_AGO)
    assert await kept(database) == ["try"], "it may be extended yet"
    store = await popped(database, SECOND, None)
    clock.advance(attempts.LOOK_AGAIN_SECONDS + 1.0)
    await store.collect(older_than_seconds=LONG_AGO)
    assert await kept(database) == []


async def test_many_that_may_be_extended_yet_do_not_keep_others_from_being_forgotten(
    database: Database, clock: ManualClock
) -> None:
    waiting = [f"try {number:04}" for number in range(attempts.ATTEMPTS_PER_TRANSACTION_MAX)]
    for attempt_id in waiting:
        await popped(database, FIRST, attempt_id, CopyId(attempt_id))
    clock.advance(1.0)
    store = await popped(database, FIRST, "settled")
    await store.settle([SettleEntry(QUEUE, COPY, FIRST, SettleAction.ACK)])
    clock.advance(11.0)
    for _ in range(2):
        await store.trim(QUEUE, settled_before=0.0, older_than_seconds=LONG_AGO)
    assert await kept(database) == waiting


class PassingClock(ManualClock):
    """A clock that advances a little at each reading."""

    def monotonic(self) -> float:
        self.advance(0.001)
        return super().monotonic()


async def test_a_collection_ends_however_many_attempts_may_be_extended_yet(tmp_path: Path) -> None:
    clock = PassingClock()
    async with opened(tmp_path, clock=clock) as database:
        numbers = range(attempts.ATTEMPTS_PER_TRANSACTION_MAX)
        store, *_ = await asyncio.gather(
            *(popped(database, FIRST, f"try {number}", CopyId(f"{number}")) for number in numbers)
        )
        clock.advance(11.0)
        async with asyncio.timeout(WAIT_SECONDS):
            await store.collect(older_than_seconds=LONG_AGO)
        assert len(await kept(database)) == attempts.ATTEMPTS_PER_TRANSACTION_MAX
