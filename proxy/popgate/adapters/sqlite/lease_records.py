"""Stores lease records as rows: reads, writes and deletes them in the caller's transaction.

A settlement nearly always names a lease that was granted moments ago. So ``LatestRecords`` also keeps in memory the
latest live records, and the fences that every grant checks. This is safe because one process owns the file and one
thread runs every job on it. Every change that bypasses ``LatestRecords.write`` (deletions, a new fence, a rollback)
must ``clear`` it.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from popgate.adapters.sqlite.bulk import insert_rows, insert_selected
from popgate.domain.lease import SETTLED_STATES, LeaseRecord, RecordState
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Subscription

STATES = (
    RecordState.LEASED,
    RecordState.EXPIRED,
    RecordState.RELEASED,
    RecordState.MOVING,
    RecordState.ACKED,
    RecordState.DEAD,
    RecordState.DISCARDED,
)
"""The states in the order of their numbers in the file. Append only. The states from 4 on are settled (``schema``)."""
ROWS_PER_TRANSACTION_MAX = 1_000
"""Maximum number of rows in one step of housekeeping, so that other jobs wait only some milliseconds for the thread."""

RECORDS_CACHED_MAX = 131_072
"""Maximum number of records in memory. This is more than the number of messages in a lease group, which is leased as a
whole, and then read and acked in the same order. Records take about 12 MiB if messages are leased together and so share
a record, and 51 MiB if each message is leased alone. A full cache is cleared, because there are then more live leases
than are likely to be settled soon."""

_STATE_CODES = {state: code for code, state in enumerate(STATES)}
_PARAMETERS_MAX = 256
# A record's fields in their order, because the record is written as a tuple.
_COLUMNS = (
    "copy_id, state, lease_id, visible_at, delivery_count, first_delivered_at, changed_at, epoch, leased_at, target, "
    "target_copy_id, reason"
)
_WRITE = f"REPLACE INTO lease (queue_id, {_COLUMNS})"
_FIELDS = len(LeaseRecord._fields)
_WRITE_EQUAL = f"{_WRITE} SELECT column1, column2, {', '.join(f'?{number}' for number in range(1, _FIELDS + 1))}"
"""Writes one record for many copies."""
_AFTER_TRANSIENT = chr(ord(TRANSIENT_PREFIX) + 1)

Row = tuple[Any, ...]
Key = tuple[int, CopyId]
"""The number of a queue, and a copy in it."""


class LatestRecords:
    """The ``lease`` table with its latest live rows in memory. Used on the database's thread only."""

    def __init__(self) -> None:
        self._live: dict[Key, LeaseRecord] = {}
        self._epochs: dict[int, int] = {}
        self._generations: dict[Subscription, int] = {}

    def clear(self) -> None:
        """Forget all rows, because the tables may have changed in another way, or were rolled back."""
        self._live.clear()
        self._epochs.clear()
        self._generations.clear()

    def epoch(self, connection: sqlite3.Connection, queue_id: int) -> int:
        """Return the epoch of the queue's newest claim."""
        epoch = self._epochs.get(queue_id)
        if epoch is None:
            row = connection.execute("SELECT epoch FROM lease_queue WHERE queue_id = ?", (queue_id,)).fetchone()
            epoch = self._epochs[queue_id] = row[0]
        return epoch

    def generation(self, connection: sqlite3.Connection, subscription: Subscription) -> int:
        """Return the lowest mode generation that may still grant leases. 0 if none was ever set."""
        generation = self._generations.get(subscription)
        if generation is None:
            sql = "SELECT generation FROM lease_mode WHERE topic = ? AND name = ?"
            row = connection.execute(sql, subscription).fetchone()
            generation = self._generations[subscription] = 0 if row is None else row[0]
        return generation

    def read(self, connection: sqlite3.Connection, keys: Sequence[Key]) -> dict[Key, LeaseRecord]:
        """Return the records of the ``keys`` that have one."""
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
        """Write the records of (queue_id, copy_id).

        Copies that were leased and settled together share one record object.
        """
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
        live = self._live
        if len(live) + len(changed) > RECORDS_CACHED_MAX:
            live.clear()
        for key, record in changed.items():
            if record.state in SETTLED_STATES:
                live.pop(key, None)
            else:
                live[key] = record


def read_records(
    connection: sqlite3.Connection, queue_id: int, copy_ids: Sequence[CopyId]
) -> dict[CopyId, LeaseRecord]:
    """Return the stored records of those ``copy_ids`` that have one. Equal records are the same object."""
    found: dict[CopyId, LeaseRecord] = {}
    made: dict[Row, LeaseRecord] = {}
    for start in range(0, len(copy_ids), _PARAMETERS_MAX):
        part = copy_ids[start : start + _PARAMETERS_MAX]
        # Padding with NULLs, which match nothing, to the next power of two limits the number of different statements.
        size = 1 << (len(part) - 1).bit_length()
        sql = f"SELECT {_COLUMNS} FROM lease WHERE queue_id = ? AND copy_id IN ({','.join('?' * size)})"
        for row in connection.execute(sql, (queue_id, *part, *(None,) * (size - len(part)))):
            record = made.get(row[1:])
            if record is None:
                record = made[row[1:]] = _record(row)
            found[row[0]] = record
    return found


def read_unsettled(
    connection: sqlite3.Connection, queue_id: int, after: str | None
) -> tuple[list[tuple[CopyId, LeaseRecord]], str | None]:
    """Return the unsettled records in the next part of a queue, and the copy id from which to continue.

    ``after`` is the copy id that the previous call returned, or None for the first part. A returned copy id of None
    means that the end was reached. The number of examined rows bounds a part.
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
    return [(row[0], _record(row)) for row in rows], None if end is None else end[0]


def delete_settled(connection: sqlite3.Connection, queue_id: int, changed_before: float) -> int:
    """Delete a queue's oldest settled records that changed before ``changed_before``: one step. Return how many.

    Records of copies that may arrive a second time (``ports.dedup``) are left to ``delete_unchanged``.
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
    """Delete the records in the next part of the table that have not changed since ``changed_before``.

    Return how many records were deleted, the oldest change among the remaining records of this part, and the key from
    which to continue (None: the end was reached).
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
    """Delete records of a queue in any state: one step. Return how many."""
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
    """Return the numbers of these queues in the lease tables. A new queue is given a number."""
    connection.executemany("INSERT OR IGNORE INTO lease_queue (name) VALUES (?)", [(name,) for name in names])
    sql = "SELECT queue_id FROM lease_queue WHERE name = ?"
    return {name: connection.execute(sql, (name,)).fetchone()[0] for name in names}


def _record(row: Row) -> LeaseRecord:
    code: int = row[1]
    return LeaseRecord(STATES[code], *row[2:])
