"""Attempts as rows: which leases a client's ``attempt_id`` was given, so that a repeated pop gets them again.

One row per (subscription, attempt id). It holds the latest lease id only: a new one begins the attempt anew.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Sequence

import orjson

from popgate.adapters.sqlite.lease_records import read_records
from popgate.domain.lease import GOOD_STATES, LeaseRecord, RecordState
from popgate.domain.names import CopyId, LeaseId, Subscription

ATTEMPTS_PER_TRANSACTION_MAX = 500
LOOK_AGAIN_SECONDS = 900.0
"""So long an attempt whose leases have run out, but may be extended yet, is not looked at again."""

Copies = Sequence[tuple[int, CopyId]]


def add_to_attempt(
    connection: sqlite3.Connection,
    subscription: Subscription,
    attempt_id: str,
    lease_id: LeaseId,
    copies: Copies,
    ends_at: float,
) -> None:
    """Note that ``lease_id`` holds ``copies`` until ``ends_at``, besides those it was given before."""
    row = connection.execute(
        "SELECT copies FROM attempt WHERE topic = ? AND name = ? AND attempt_id = ? AND lease_id = ?",
        (*subscription, attempt_id, lease_id),
    ).fetchone()
    earlier: list[tuple[int, CopyId]] = [] if row is None else orjson.loads(row[0])
    connection.execute(
        "REPLACE INTO attempt (topic, name, attempt_id, lease_id, ends_at, copies) VALUES (?, ?, ?, ?, ?, ?)",
        (*subscription, attempt_id, lease_id, ends_at, orjson.dumps([*earlier, *copies])),
    )


def read_attempt(
    connection: sqlite3.Connection, subscription: Subscription, attempt_id: str, now: float
) -> list[tuple[int, CopyId, LeaseRecord]]:
    """What the attempt still holds at ``now``, in the order it was given."""
    row = connection.execute(
        "SELECT lease_id, copies FROM attempt WHERE topic = ? AND name = ? AND attempt_id = ?",
        (*subscription, attempt_id),
    ).fetchone()
    if row is None:
        return []
    given = _good(connection, row[0], orjson.loads(row[1]))
    return [one for one in given if one[2].state is RecordState.LEASED and one[2].visible_at > now]


def delete_ended_attempts(connection: sqlite3.Connection, now: float) -> int:
    """Delete attempts that will not find a lease any more: one bite. Returns how many rows were looked at.

    An extension is not noted in the attempt when it is made, and may come when the lease has run out: until somebody
    else gets the message. So no attempt goes before all its leases are settled, given back or with others.
    """
    rows = connection.execute(
        "SELECT topic, name, attempt_id, lease_id, copies FROM attempt WHERE ends_at < ? ORDER BY ends_at LIMIT ?",
        (now, ATTEMPTS_PER_TRANSACTION_MAX),
    ).fetchall()
    for *key, lease_id, copies in rows:
        good = _good(connection, lease_id, orjson.loads(copies))
        if good:
            ends_at = max(now + LOOK_AGAIN_SECONDS, *(record.visible_at for _, _, record in good))
            connection.execute(
                "UPDATE attempt SET ends_at = ? WHERE topic = ? AND name = ? AND attempt_id = ?", (ends_at, *key)
            )
        else:
            connection.execute("DELETE FROM attempt WHERE topic = ? AND name = ? AND attempt_id = ?", key)
    return len(rows)


def _good(connection: sqlite3.Connection, lease_id: LeaseId, copies: Copies) -> list[tuple[int, CopyId, LeaseRecord]]:
    """Those of ``copies`` that nobody else was given since, nor settled, with their records."""
    by_queue: dict[int, list[CopyId]] = defaultdict(list)
    for queue_id, copy_id in copies:
        by_queue[queue_id].append(copy_id)
    records = {queue_id: read_records(connection, queue_id, copy_ids) for queue_id, copy_ids in by_queue.items()}
    found: list[tuple[int, CopyId, LeaseRecord]] = []
    for queue_id, copy_id in copies:
        record = records[queue_id].get(copy_id)
        if record is not None and record.lease_id == lease_id and record.state in GOOD_STATES:
            found.append((queue_id, copy_id, record))
    return found
