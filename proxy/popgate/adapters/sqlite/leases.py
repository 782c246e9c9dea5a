"""Implements the lease store on SQLite.

A grant or settlement is one transaction. It reads the records, lets the domain decide, and writes the changes.

This module owns the ids of queues, and deletes old records in small steps. ``lease_decisions`` owns grants and
settlements. ``lease_records`` and ``attempts`` own the rows.
"""

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from popgate.adapters.sqlite.attempts import (
    ATTEMPTS_PER_TRANSACTION_MAX,
    delete_ended_attempts,
    read_attempt,
)
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.lease_decisions import grant, settle
from popgate.adapters.sqlite.lease_records import (
    ROWS_PER_TRANSACTION_MAX,
    LatestRecords,
    delete_queue_part,
    delete_records,
    delete_settled,
    delete_transient,
    delete_unchanged,
    intern_queues,
    read_records,
    read_unsettled,
)
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAnswer, remaining_seconds
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Subscription
from popgate.ports.leases import (
    AttemptLease,
    GrantRequest,
    LeaseStore,
    LoadedRecord,
    SettleEntry,
)

T = TypeVar("T")


class SqliteLeaseStore:
    """Implements the port ``LeaseStore`` on ``database``. The caller opens and closes ``database``.

    ``records`` is the cache of lease records. If other stores on the same database also change lease records, all of
    them must use the same cache.
    """

    def __init__(self, database: Database, records: LatestRecords | None = None) -> None:
        self._database = database
        self._queue_ids: dict[BrokerQueue, int] = {}
        """The ids of queues, by name. It contains only ids on stable storage. An id never changes."""
        self._queue_names: dict[int, BrokerQueue] = {}
        self._records = records or LatestRecords()
        self._oldest_change: float | None = None
        """The earliest time at which any remaining record last changed, according to the latest ``collect``. While this
        time is too recent, ``collect`` finds no record to delete."""
        database.on_rollback(self._records.clear)

    def unavailable_reason(self) -> str | None:
        return self._database.failure()

    async def claim(self, queue: BrokerQueue) -> int:
        (queue_id,) = await self._ids([queue])

        def job(connection: sqlite3.Connection) -> int:
            delete_transient(connection, queue_id)
            connection.execute("UPDATE lease_queue SET epoch = epoch + 1 WHERE queue_id = ?", (queue_id,))
            self._records.clear()
            return self._records.epoch(connection, queue_id)

        return await self._write(job)

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        (queue_id,) = await self._ids([queue])

        def job(connection: sqlite3.Connection) -> int:
            now = self._database.now()
            known = self._records.read(connection, [(queue_id, one.copy_id) for one in records])
            missing = {
                (queue_id, copy_id): record._replace(visible_at=now + remaining, changed_at=now)
                for copy_id, record, remaining in records
                if (queue_id, copy_id) not in known
            }
            self._records.write(connection, missing)
            sql = "UPDATE lease_queue SET epoch = max(epoch, ?) + 1 WHERE queue_id = ?"
            connection.execute(sql, (above, queue_id))
            self._records.clear()
            return self._records.epoch(connection, queue_id)

        return await self._write(job)

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        def job(connection: sqlite3.Connection) -> int:
            connection.execute(
                "INSERT INTO lease_mode (topic, name, generation) VALUES (?, ?, ?) "
                "ON CONFLICT (topic, name) DO UPDATE SET generation = max(generation, excluded.generation)",
                (*subscription, generation),
            )
            self._records.clear()
            return self._records.generation(connection, subscription)

        return await self._write(job)

    async def load(self, queue: BrokerQueue) -> list[LoadedRecord]:
        (queue_id,) = await self._ids([queue])
        loaded: list[LoadedRecord] = []
        after: str | None = None
        while True:
            job = partial(read_unsettled, queue_id=queue_id, after=after, now=self._database.now)
            records, after = await self._read(job)
            loaded += records
            if after is None:
                return loaded

    async def peek(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> dict[CopyId, LeaseRecord]:
        (queue_id,) = await self._ids([queue])
        return await self._read(partial(read_records, queue_id=queue_id, copy_ids=copy_ids))

    async def grant(self, request: GrantRequest) -> list[GrantAnswer]:
        entries = request.entries
        queue_ids = await self._ids([entry.queue for entry in entries])
        return await self._write(
            lambda connection: grant(connection, self._records, request, queue_ids, self._database.now())
        )

    async def settle(self, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
        queue_ids = await self._ids([entry.queue for entry in entries])
        return await self._write(
            lambda connection: settle(connection, self._records, entries, queue_ids, self._database.now())
        )

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        def job(connection: sqlite3.Connection) -> tuple[list[tuple[int, CopyId, LeaseRecord]], float]:
            now = self._database.now()
            return read_attempt(connection, subscription, attempt_id, now), now

        found, now = await self._read(job)
        unknown = [queue_id for queue_id, _, _ in found if queue_id not in self._queue_names]
        if unknown:  # their ids were assigned before this process started
            rows = await self._read(lambda c: c.execute("SELECT name, queue_id FROM lease_queue").fetchall())
            self._remember(dict(rows))
        return [
            AttemptLease(self._queue_names[queue_id], copy_id, record, remaining_seconds(record, now))
            for queue_id, copy_id, record in found
        ]

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        (queue_id,) = await self._ids([queue])
        before = min(settled_before, self._database.now() - older_than_seconds)
        await self._write(lambda connection: delete_ended_attempts(connection, self._database.now()))
        return await self._repeat(lambda connection: delete_settled(connection, queue_id, before))

    async def collect(self, *, older_than_seconds: float) -> int:
        now = self._database.now()
        before = now - older_than_seconds
        total = 0
        if self._oldest_change is None or self._oldest_change < before:
            oldest = now
            after: tuple[int, str] | None = (0, "")
            while after is not None:
                count, change, after = await self._delete(partial(delete_unchanged, after=after, changed_before=before))
                total += count
                oldest = min(oldest, now if change is None else change)
            self._oldest_change = oldest
        looked_at = ATTEMPTS_PER_TRANSACTION_MAX
        while looked_at == ATTEMPTS_PER_TRANSACTION_MAX:
            looked_at = await self._write(lambda connection: delete_ended_attempts(connection, self._database.now()))
        return total

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        (queue_id,) = await self._ids([queue])
        # Delete only transient records. A durable record may be the only thing that prevents a second delivery of an
        # acked message.
        transient = [copy_id for copy_id in copy_ids if copy_id.startswith(TRANSIENT_PREFIX)]
        if transient:
            await self._delete(lambda connection: delete_records(connection, queue_id, transient))

    async def drop_queue(self, queue: BrokerQueue) -> None:
        (queue_id,) = await self._ids([queue])
        await self._repeat(lambda connection: delete_queue_part(connection, queue_id))

    # -- how -------------------------------------------------------------------------------------------------------

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.write(job, StateUnavailable)

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.read(job, StateUnavailable)

    async def _delete(self, delete: Callable[[sqlite3.Connection], T]) -> T:
        """Run the job ``delete``, which deletes records.

        Clear the cache first, because it may contain these records.
        """

        def job(connection: sqlite3.Connection) -> T:
            self._records.clear()
            return delete(connection)

        return await self._write(job)

    async def _repeat(self, delete: Callable[[sqlite3.Connection], int]) -> int:
        """Repeat ``delete`` until it deletes fewer rows than its limit. Return the total number of deleted rows."""
        total = 0
        while True:
            count = await self._delete(delete)
            total += count
            if count < ROWS_PER_TRANSACTION_MAX:
                return total

    async def _ids(self, queues: Sequence[BrokerQueue]) -> list[int]:
        """Return the ids of ``queues`` in the lease tables, in the same order.

        Assign ids to new queues, and commit these ids, so that a rollback of a later job does not undo them.
        """
        known = self._queue_ids
        try:
            return [known[name] for name in queues]
        except KeyError:
            unknown = [name for name in dict.fromkeys(queues) if name not in known]
        self._remember(await self._write(lambda connection: intern_queues(connection, unknown)))
        return [known[name] for name in queues]

    def _remember(self, ids: dict[BrokerQueue, int]) -> None:
        self._queue_ids.update(ids)
        self._queue_names.update((queue_id, name) for name, queue_id in ids.items())


_conforms: type[LeaseStore] = SqliteLeaseStore
