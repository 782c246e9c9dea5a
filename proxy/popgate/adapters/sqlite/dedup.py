"""Implements the dedup store on SQLite. Cleanup runs in many short transactions, and every other call in one.

Usually all dedup ids of a publish are new. In this case, the ids are inserted as consecutive rows, and one statement
confirms all these rows.
"""

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from popgate.adapters.sqlite.bulk import insert_rows, insert_selected, parameters, parts
from popgate.adapters.sqlite.database import Database
from popgate.domain.errors import StateUnavailable
from popgate.domain.names import CopyId, TopicName
from popgate.ports.dedup import DedupEntry, DedupStore, Reservation

ROWS_PER_TRANSACTION_MAX = 1_000
"""Maximum number of rows that one cleanup transaction deletes, so that other jobs wait only some milliseconds for the
thread."""

BATCHES_MAX = 1_024
"""Maximum number of unconfirmed batches in memory. The reservations of other batches are confirmed by their ids."""

_INSERT = (
    "INSERT OR IGNORE INTO dedup (topic, reserved_at, confirmed, dedup_id, copy_id, message_id, queue_index) "
    "SELECT ?1, ?2, ?3, column1, column2, nullif(column3, column2), column4"
)
"""Inserts one row for each ``DedupEntry``. An id that is already stored is skipped."""

T = TypeVar("T")


class _Batch(NamedTuple):
    """The consecutive rows that one call of ``reserve`` inserted, in the order of the call's entries."""

    first_row: int
    size: int
    reserved_at: float


class SqliteDedupStore:
    """Implements the port ``DedupStore`` on ``database``. The caller opens and closes ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._batches: dict[CopyId, _Batch] = {}
        """Batches that are not yet confirmed, by the copy id of the first entry."""

    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Reservation]:
        earlier, batch = await self._write(
            lambda connection: _reserve(connection, topic, entries, self._database.now(), window_seconds)
        )
        if batch is not None:
            self._batches[entries[0].copy_id] = batch
            if len(self._batches) > BATCHES_MAX:
                del self._batches[next(iter(self._batches))]
        return earlier

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        batch = self._batches.pop(entries[0].copy_id, None)
        await self._write(partial(_confirm, topic=topic, entries=entries, batch=batch))

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        unrepeated = "AND confirmed = 0 AND copy_id NOT IN (SELECT copy_id FROM repeated_copy)"
        await self._write(
            partial(_change, topic=topic, entries=entries, change="DELETE FROM dedup", condition=unrepeated)
        )

    async def drop_topic(self, topic: TopicName) -> None:
        await self._repeat(
            "DELETE FROM dedup WHERE row_id IN (SELECT row_id FROM dedup WHERE topic = ? LIMIT ?)",
            (topic, ROWS_PER_TRANSACTION_MAX),
        )

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        now = self._database.now()
        await self._repeat(
            "DELETE FROM repeated_copy WHERE copy_id IN "
            "(SELECT copy_id FROM repeated_copy WHERE noted_at <= ? LIMIT ?)",
            (now - noted_seconds, ROWS_PER_TRANSACTION_MAX),
        )
        # Row ids increase with ``reserved_at``. So each step examines only the rows with the lowest ids.
        return await self._repeat(
            "DELETE FROM dedup WHERE row_id IN (SELECT row_id FROM "
            "(SELECT row_id, reserved_at FROM dedup ORDER BY row_id LIMIT ?2) WHERE reserved_at <= ?1)",
            (now - window_seconds, ROWS_PER_TRANSACTION_MAX),
        )

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.write(job, StateUnavailable)

    async def _repeat(self, delete: str, bounds: tuple[object, ...]) -> int:
        """Repeat ``delete`` until it deletes fewer rows than its limit. Return the total number of deleted rows."""
        total = 0
        while True:
            count = await self._write(lambda connection: connection.execute(delete, bounds).rowcount)
            total += count
            if count < ROWS_PER_TRANSACTION_MAX:
                return total


def _reserve(
    connection: sqlite3.Connection,
    topic: TopicName,
    entries: Sequence[DedupEntry],
    now: float,
    window_seconds: float,
) -> tuple[dict[str, Reservation], _Batch | None]:
    """Reserve ``entries`` as described in ``DedupStore.reserve``. If all ids were new, also return the new rows."""
    if _insert(connection, topic, entries, now) == len(entries):
        (last_row,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return {}, _Batch(last_row - len(entries) + 1, len(entries), now)
    found = _read(connection, topic, [entry.dedup_id for entry in entries])
    ended = [entry for entry in entries if found[entry.dedup_id][1] <= now - window_seconds]
    if ended:
        _change(connection, topic, [found[entry.dedup_id][0].entry for entry in ended], "DELETE FROM dedup")
        _insert(connection, topic, ended, now)
        found.update((entry.dedup_id, (Reservation(entry, is_confirmed=False), now)) for entry in ended)
    earlier: dict[str, Reservation] = {}
    for entry in entries:
        one = found[entry.dedup_id][0]
        if one.is_confirmed or one.entry.copy_id != entry.copy_id:
            earlier[entry.dedup_id] = one
    repeated = [(one.entry.copy_id, now) for one in earlier.values() if not one.is_confirmed]
    insert_rows(connection, "REPLACE INTO repeated_copy (copy_id, noted_at)", repeated)
    return earlier, None


def _confirm(
    connection: sqlite3.Connection, topic: TopicName, entries: Sequence[DedupEntry], batch: _Batch | None
) -> None:
    """Confirm the reservations of ``entries``. If ``batch`` contains their rows, use a single statement."""
    if batch is not None and batch.size == len(entries):
        rows = (batch.first_row, batch.first_row + batch.size - 1, batch.reserved_at)
        confirm = "UPDATE dedup SET confirmed = 1 WHERE row_id BETWEEN ? AND ? AND reserved_at = ?"
        if connection.execute(confirm, rows).rowcount == batch.size:
            return
    _change(connection, topic, entries, "UPDATE dedup SET confirmed = 1")


def insert_confirmed(
    connection: sqlite3.Connection, topic: TopicName, entries: Sequence[DedupEntry], now: float
) -> bool:
    """If no id of ``entries`` is stored yet, insert all of them as confirmed, and return True.

    Otherwise change nothing, and return False.
    """
    connection.execute("SAVEPOINT ids")
    are_free = _insert(connection, topic, entries, now, confirmed=True) == len(entries)
    if not are_free:
        connection.execute("ROLLBACK TO ids")
    connection.execute("RELEASE ids")
    return are_free


def _insert(
    connection: sqlite3.Connection,
    topic: TopicName,
    entries: Sequence[DedupEntry],
    now: float,
    *,
    confirmed: bool = False,
) -> int:
    """Insert the ids of ``entries`` that are not stored yet. Return the number of inserted ids."""
    return insert_selected(connection, _INSERT, (topic, now, confirmed), entries)


def _read(
    connection: sqlite3.Connection, topic: TopicName, dedup_ids: Sequence[str]
) -> dict[str, tuple[Reservation, float]]:
    """Return, for each stored id of ``dedup_ids``, its reservation and the time of the reservation."""
    found: dict[str, tuple[Reservation, float]] = {}
    for part in parts(dedup_ids):
        sql = (
            "SELECT dedup_id, copy_id, coalesce(message_id, copy_id), queue_index, reserved_at, confirmed FROM dedup "
            f"WHERE topic = ? AND dedup_id IN ({parameters(len(part))})"
        )
        for dedup_id, copy_id, message_id, index, reserved_at, confirmed in connection.execute(sql, (topic, *part)):
            entry = DedupEntry(dedup_id, CopyId(copy_id), message_id, index)
            found[dedup_id] = Reservation(entry, bool(confirmed)), reserved_at
    return found


def _change(
    connection: sqlite3.Connection, topic: TopicName, entries: Sequence[DedupEntry], change: str, condition: str = ""
) -> None:
    """Run ``change`` on the rows whose dedup id and copy id both occur in ``entries``."""
    for part in parts(entries):
        places = parameters(len(part))
        connection.execute(
            f"{change} WHERE topic = ? AND dedup_id IN ({places}) AND copy_id IN ({places}) {condition}",
            (topic, *(entry.dedup_id for entry in part), *(entry.copy_id for entry in part)),
        )


_conforms: type[DedupStore] = SqliteDedupStore
