"""Stores lease records as rows. Each function runs in the transaction of its caller.

Most settlements refer to a lease that was granted shortly before. So ``LatestRecords`` caches the latest unsettled
records in memory, and also the epochs and mode generations that every grant checks. The cache is safe because no other
process uses the file, and one thread runs all jobs. After each change that does not use ``LatestRecords.write``, such
as a deletion, a new epoch or a rollback, ``LatestRecords.clear`` must be called.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from popgate.adapters.sqlite.bulk import insert_rows, insert_selected
from popgate.domain.lease import SETTLED_STATES, LeaseRecord, RecordState, remaining_seconds
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Subscription
from popgate.ports.leases import LoadedRecord

STATES = (
    RecordState.LEASED,
    RecordState.EXPIRED,
    RecordState.RELEASED,
    RecordState.MOVING,
    RecordState.ACKED,
    RecordState.DEAD,
    RecordState.DISCARDED,
)
"""The states of lease records. The file contains the index of a state in this tuple, so new states must be appended.
States with index 4 or higher are settled. The index ``lease_settled`` in ``schema`` relies on this."""
ROWS_PER_TRANSACTION_MAX = 1_000
"""Maximum number of rows that one transaction of a cleanup or a full load examines, so that other jobs wait only some
milliseconds for the thread."""

RECORDS_CACHED_MAX = 131_072
"""Maximum number of lease records in memory. The cache has room for all messages of a lease group, which are leased
together, and later read and acked in the same order. A full cache takes about 12 MiB if messages are leased together
and so share a record, and 51 MiB if each message is leased alone. A full cache is cleared, because most of so many
leases will not be settled soon."""

_STATE_CODES = {state: code for code, state in enumerate(STATES)}
_PARAMETERS_MAX = 256
# The columns after copy_id are in the order of the fields of LeaseRecord, because a record is written as a tuple.
_COLUMNS = (
    "copy_id, state, lease_id, visible_at, delivery_count, first_delivered_at, changed_at, epoch, leased_at, target, "
    "target_copy_id, reason"
)
_WRITE = f"REPLACE INTO lease (queue_id, {_COLUMNS})"
_FIELDS = len(LeaseRecord._fields)
_WRITE_ONE = f"{_WRITE} VALUES ({','.join('?' * (2 + _FIELDS))})"
_WRITE_EQUAL = f"{_WRITE} SELECT column1, column2, {', '.join(f'?{number}' for number in range(1, _FIELDS + 1))}"
"""Writes the same record for many copies in one statement."""
_AFTER_TRANSIENT = chr(ord(TRANSIENT_PREFIX) + 1)

Row = tuple[Any, ...]
Key = tuple[int, CopyId]
"""The id of a queue in the lease tables, and the id of a copy in this queue."""


class LatestRecords:
    """Reads and writes the ``lease`` table, and caches its latest unsettled rows in memory.

    Must be used only on the thread of the database.
    """

    def __init__(self) -> None:
        self._live: dict[Key, LeaseRecord] = {}
        self._epochs: dict[int, int] = {}
        self._generations: dict[Subscription, int] = {}

    def clear(self) -> None:
        """Clear the cache, because the tables were changed without ``write``, or were rolled back."""
        self._live.clear()
        self._epochs.clear()
        self._generations.clear()

    def epoch(self, connection: sqlite3.Connection, queue_id: int) -> int:
        """Return the epoch of the latest claim of the queue."""
        epoch = self._epochs.get(queue_id)
        if epoch is None:
            row = connection.execute("SELECT epoch FROM lease_queue WHERE queue_id = ?", (queue_id,)).fetchone()
            epoch = self._epochs[queue_id] = row[0]
        return epoch

    def generation(self, connection: sqlite3.Connection, subscription: Subscription) -> int:
        """Return the lowest mode generation that may still grant leases, or 0 if none was ever set."""
        generation = self._generations.get(subscription)
        if generation is None:
            sql = "SELECT generation FROM lease_mode WHERE topic = ? AND name = ?"
            row = connection.execute(sql, subscription).fetchone()
            generation = self._generations[subscription] = 0 if row is None else row[0]
        return generation

    def read(self, connection: sqlite3.Connection, keys: Sequence[Key]) -> dict[Key, LeaseRecord]:
        """Return the lease records of ``keys``. Keys without a record are left out."""
        live = self._live
        found: dict[Key, LeaseRecord] = {}
        others: dict[int, list[CopyId]] = {}
        for key in keys:
            record = live.get(key)
            if record is None:
                others.setdefault(key[0], []).append(key[1])
            else:
                found[key] = record
        for queue_id, copy_ids in others.items():
            for copy_id, record in read_records(connection, queue_id, copy_ids).items():
                found[queue_id, copy_id] = record
        return found

    def write(self, connection: sqlite3.Connection, changed: Mapping[Key, LeaseRecord]) -> None:
        """Write the changed lease records to the table and to the cache.

        Copies that share one record object, because they were leased or settled together, are written with one
        statement.
        """
        if len(changed) == 1:
            for key, record in changed.items():
                connection.execute(_WRITE_ONE, (*key, _STATE_CODES[record.state], *record[1:]))
        else:
            _write_many(connection, changed)
        live = self._live
        if len(live) + len(changed) > RECORDS_CACHED_MAX:
            live.clear()
        for key, record in changed.items():
            if record.state in SETTLED_STATES:
                live.pop(key, None)
            else:
                live[key] = record


def _write_many(connection: sqlite3.Connection, changed: Mapping[Key, LeaseRecord]) -> None:
    shared: dict[int, list[Key]] = {}
    for key, record in changed.items():
        shared.setdefault(id(record), []).append(key)
    rows: list[Row] = []
    for keys in shared.values():
        record = changed[keys[0]]
        columns = (_STATE_CODES[record.state], *record[1:])
        if len(keys) > 1:
            insert_selected(connection, _WRITE_EQUAL, columns, keys)
        else:
            rows.append((*keys[0], *columns))
    insert_rows(connection, _WRITE, rows)


def read_records(
    connection: sqlite3.Connection, queue_id: int, copy_ids: Sequence[CopyId]
) -> dict[CopyId, LeaseRecord]:
    """Return the stored lease records of ``copy_ids``. Copies without a record are left out.

    Equal records are the same object.
    """
    found: dict[CopyId, LeaseRecord] = {}
    made: dict[Row, LeaseRecord] = {}
    for start in range(0, len(copy_ids), _PARAMETERS_MAX):
        part = copy_ids[start : start + _PARAMETERS_MAX]
        # The parameters are padded with NULLs, which match no row, to the next power of two. This limits the number of
        # different SQL statements.
        size = 1 << (len(part) - 1).bit_length()
        sql = f"SELECT {_COLUMNS} FROM lease WHERE queue_id = ? AND copy_id IN ({','.join('?' * size)})"
        for row in connection.execute(sql, (queue_id, *part, *(None,) * (size - len(part)))):
            record = made.get(row[1:])
            if record is None:
                record = made[row[1:]] = _record(row)
            found[row[0]] = record
    return found


def read_unsettled(
    connection: sqlite3.Connection, queue_id: int, after: str | None, now: Callable[[], float]
) -> tuple[list[LoadedRecord], str | None]:
    """Return the unsettled records in the next slice of a queue's rows, and the copy id for the next call.

    ``after`` must be the copy id that the previous call returned, or None in the first call. If the returned copy id is
    None, no rows are left. A slice has at most ``ROWS_PER_TRANSACTION_MAX`` rows, including settled ones. ``now``
    returns the time of the store.
    """
    part = "queue_id = ?"
    bounds: tuple[int | str, ...] = (queue_id,)
    if after is not None:
        part, bounds = f"{part} AND copy_id > ?", (*bounds, after)
    end: Row | None = connection.execute(
        f"SELECT copy_id FROM lease WHERE {part} ORDER BY copy_id LIMIT 1 OFFSET ?",
        (*bounds, ROWS_PER_TRANSACTION_MAX - 1),
    ).fetchone()
    if end is not None:
        part, bounds = f"{part} AND copy_id <= ?", (*bounds, end[0])
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM lease WHERE {part} AND state < 4 ORDER BY queue_id, copy_id", bounds
    )
    return _loaded(rows, now()), None if end is None else end[0]


def _loaded(rows: Iterable[Row], now: float) -> list[LoadedRecord]:
    """Return the records of ``rows``, in the same order. Equal records that follow each other are one object.

    Messages that were leased together have equal records, and follow each other if they were published together.
    """
    loaded: list[LoadedRecord] = []
    latest: Row = ()
    record: LeaseRecord | None = None
    remaining = 0.0
    for row in rows:
        columns = row[1:]
        if record is None or columns != latest:
            latest, record = columns, _record(row)
            remaining = remaining_seconds(record, now)
        loaded.append(LoadedRecord(row[0], record, remaining))
    return loaded


def delete_settled(connection: sqlite3.Connection, queue_id: int, changed_before: float) -> int:
    """Delete the oldest settled records of a queue. Return the number of deleted records.

    One call deletes at most ``ROWS_PER_TRANSACTION_MAX`` records, and only records that last changed before
    ``changed_before``. Records of copies that the broker may contain twice (``repeated_copy``) are not deleted here,
    but only by ``delete_unchanged``.
    """
    return connection.execute(
        "DELETE FROM lease WHERE queue_id = ?1 AND copy_id IN (SELECT copy_id FROM lease INDEXED BY lease_settled "
        "WHERE queue_id = ?1 AND state >= 4 AND changed_at < ?2 AND copy_id NOT IN (SELECT copy_id FROM repeated_copy) "
        "ORDER BY changed_at LIMIT ?3)",
        (queue_id, changed_before, ROWS_PER_TRANSACTION_MAX),
    ).rowcount


def delete_unchanged(
    connection: sqlite3.Connection, after: tuple[int, str], changed_before: float
) -> tuple[int, float | None, tuple[int, str] | None]:
    """Delete old records in the next slice of the table: those that have not changed since ``changed_before``.

    The slice starts behind the key ``after``. Return three values: the number of deleted records, the earliest change
    of the remaining records in the slice (None if none remain), and the key for the next call (None if no rows are
    left).
    """
    end: tuple[int, str] | None = connection.execute(
        "SELECT queue_id, copy_id FROM lease WHERE (queue_id, copy_id) > (?, ?) ORDER BY queue_id, copy_id "
        "LIMIT 1 OFFSET ?",
        (*after, ROWS_PER_TRANSACTION_MAX - 1),
    ).fetchone()
    part = "(queue_id, copy_id) > (?, ?)"
    bounds: tuple[int | str, ...] = after
    if end is not None:
        part, bounds = f"{part} AND (queue_id, copy_id) <= (?, ?)", (*after, *end)
    count = connection.execute(f"DELETE FROM lease WHERE {part} AND changed_at < ?", (*bounds, changed_before)).rowcount
    (oldest,) = connection.execute(f"SELECT min(changed_at) FROM lease WHERE {part}", bounds).fetchone()
    return count, oldest, end


def delete_queue_part(connection: sqlite3.Connection, queue_id: int) -> int:
    """Delete at most ``ROWS_PER_TRANSACTION_MAX`` records of a queue, in any state.

    Return the number of deleted records.
    """
    return connection.execute(
        "DELETE FROM lease WHERE queue_id = ?1 AND copy_id IN (SELECT copy_id FROM lease WHERE queue_id = ?1 LIMIT ?2)",
        (queue_id, ROWS_PER_TRANSACTION_MAX),
    ).rowcount


def delete_transient(connection: sqlite3.Connection, queue_id: int) -> None:
    connection.execute(
        "DELETE FROM lease WHERE queue_id = ? AND copy_id >= ? AND copy_id < ?",
        (queue_id, TRANSIENT_PREFIX, _AFTER_TRANSIENT),
    )


def delete_records(connection: sqlite3.Connection, queue_id: int, copy_ids: Sequence[CopyId]) -> None:
    connection.executemany(
        "DELETE FROM lease WHERE queue_id = ? AND copy_id = ?", [(queue_id, copy_id) for copy_id in copy_ids]
    )


def intern_queues(connection: sqlite3.Connection, names: Sequence[BrokerQueue]) -> dict[BrokerQueue, int]:
    """Return the ids of the queues ``names`` in the lease tables. Assign an id to each queue that has none."""
    connection.executemany("INSERT OR IGNORE INTO lease_queue (name) VALUES (?)", [(name,) for name in names])
    sql = "SELECT queue_id FROM lease_queue WHERE name = ?"
    return {name: connection.execute(sql, (name,)).fetchone()[0] for name in names}


def _record(row: Row) -> LeaseRecord:
    code: int = row[1]
    return LeaseRecord(STATES[code], *row[2:])
