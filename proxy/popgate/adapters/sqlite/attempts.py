"""Stores the leases of a client's ``attempt_id``, so that a repeated pop returns the same leases.

There is one row for each pair of a subscription and an attempt id. The row contains one lease id and the messages
leased under it. If a pop grants messages under another lease id, the row is replaced.
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
"""Maximum seconds until an attempt is checked, because its leases may be settled or released long before they end. An
attempt whose leases have expired, but can still be extended, is checked again after this time."""

Copies = Sequence[tuple[int, CopyId]]


def add_to_attempt(
    connection: sqlite3.Connection,
    subscription: Subscription,
    attempt_id: str,
    lease_id: LeaseId,
    copies: Copies,
    now: float,
    ends_at: float,
) -> None:
    """Record at ``now`` that ``copies`` were leased under ``lease_id`` until ``ends_at``.

    If the attempt already contains copies under the same lease id, the new copies are appended to them.
    """
    row = connection.execute(
        "SELECT copies FROM attempt WHERE topic = ? AND name = ? AND attempt_id = ? AND lease_id = ?",
        (*subscription, attempt_id, lease_id),
    ).fetchone()
    earlier: list[tuple[int, CopyId]] = [] if row is None else orjson.loads(row[0])
    connection.execute(
        "REPLACE INTO attempt (topic, name, attempt_id, lease_id, ends_at, copies) VALUES (?, ?, ?, ?, ?, ?)",
        (
            *subscription,
            attempt_id,
            lease_id,
            min(ends_at, now + LOOK_AGAIN_SECONDS),
            orjson.dumps([*earlier, *copies]),
        ),
    )


def read_attempt(
    connection: sqlite3.Connection, subscription: Subscription, attempt_id: str, now: float
) -> list[tuple[int, CopyId, LeaseRecord]]:
    """Return the leases of the attempt that have not expired at ``now``, in the order in which they were granted.

    Leases that were settled, released or granted to another client are left out.
    """
    row = connection.execute(
        "SELECT lease_id, copies FROM attempt WHERE topic = ? AND name = ? AND attempt_id = ?",
        (*subscription, attempt_id),
    ).fetchone()
    if row is None:
        return []
    given = _good(connection, row[0], orjson.loads(row[1]))
    return [one for one in given if one[2].state is RecordState.LEASED and one[2].visible_at > now]


def delete_ended_attempts(connection: sqlite3.Connection, now: float) -> int:
    """Delete attempts that have no lease left to return. Return the number of examined rows.

    One call examines at most ``ATTEMPTS_PER_TRANSACTION_MAX`` rows. The row of an attempt is not updated when its
    leases are extended. An expired lease can be extended until another client is granted the message. Therefore an
    attempt is deleted only when each of its leases is settled, released or granted to another client.
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
    """Return the ``copies`` whose lease under ``lease_id`` can still be used, with their lease records.

    Copies that were settled, released or granted under another lease id are left out.
    """
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
