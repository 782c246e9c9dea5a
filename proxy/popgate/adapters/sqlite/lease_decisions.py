"""Grants and settlements as jobs: read the records, ask the domain, write what changed.

Owns which rows a decision needs and what becomes of its answer. The decisions are ``domain.lease``'s.
"""

import sqlite3
from collections.abc import Sequence

from popgate.adapters.sqlite.attempts import add_to_attempt
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.domain.lease import GrantStatus, LeaseRecord, decide_grant, decide_settle
from popgate.domain.names import CopyId, Subscription
from popgate.ports.leases import GrantAnswer, GrantRequest, SettleAnswer, SettleEntry

_FENCED = GrantAnswer(GrantStatus.FENCED, 0.0, None)


def grant(
    connection: sqlite3.Connection, table: LatestRecords, request: GrantRequest, queue_ids: Sequence[int], now: float
) -> list[GrantAnswer]:
    entries = request.entries
    if _generation(connection, request.subscription) > request.mode_generation:
        return [_FENCED] * len(entries)
    epochs = {queue_id: epoch_of(connection, queue_id) for queue_id in set(queue_ids)}
    records = _records(connection, table, queue_ids, [entry.copy_id for entry in entries])
    answers: list[GrantAnswer] = []
    changed: dict[tuple[int, CopyId], LeaseRecord] = {}
    for (_, epoch, copy_id, earlier), queue_id in zip(entries, queue_ids, strict=True):
        if epoch < epochs[queue_id]:
            answers.append(_FENCED)
            continue
        known = records[queue_id]
        decided = decide_grant(
            known.get(copy_id),
            now=now,
            lease_id=request.lease_id,
            invisibility_seconds=request.invisibility_seconds,
            max_deliveries=request.max_deliveries,
            earlier_deliveries=earlier,
            epoch=epoch,
        )
        record = decided.record
        if decided.changed:
            known[copy_id] = changed[queue_id, copy_id] = record
        answers.append(GrantAnswer(decided.status, remaining_seconds(record, now), record))
    table.write(connection, changed)
    if request.attempt_id is not None and changed:
        ends_at = now + request.invisibility_seconds
        add_to_attempt(connection, request.subscription, request.attempt_id, request.lease_id, list(changed), ends_at)
    return answers


def settle(
    connection: sqlite3.Connection,
    table: LatestRecords,
    entries: Sequence[SettleEntry],
    queue_ids: Sequence[int],
    now: float,
) -> list[SettleAnswer]:
    records = _records(connection, table, queue_ids, [entry.copy_id for entry in entries])
    answers: list[SettleAnswer] = []
    changed: dict[tuple[int, CopyId], LeaseRecord] = {}
    for entry, queue_id in zip(entries, queue_ids, strict=True):
        _, copy_id, lease_id, action, seconds, target, target_copy_id, reason = entry
        known = records[queue_id]
        settled = decide_settle(
            known.get(copy_id),
            action,
            now=now,
            lease_id=lease_id,
            seconds=seconds,
            target=target,
            target_copy_id=target_copy_id,
            reason=reason,
        )
        record = settled.record
        if settled.changed and record is not None:
            known[copy_id] = changed[queue_id, copy_id] = record
        remaining = 0.0 if record is None else remaining_seconds(record, now)
        answers.append(SettleAnswer(settled.status, remaining, record, now))
    table.write(connection, changed)
    return answers


def _records(
    connection: sqlite3.Connection, table: LatestRecords, queue_ids: Sequence[int], copy_ids: Sequence[CopyId]
) -> dict[int, dict[CopyId, LeaseRecord]]:
    """The records of the copies, by queue; ``queue_ids[i]`` is the queue of ``copy_ids[i]``."""
    wanted: dict[int, list[CopyId]] = {queue_id: [] for queue_id in queue_ids}
    for queue_id, copy_id in zip(queue_ids, copy_ids, strict=True):
        wanted[queue_id].append(copy_id)
    return {queue_id: table.read(connection, queue_id, wanted_here) for queue_id, wanted_here in wanted.items()}


def epoch_of(connection: sqlite3.Connection, queue_id: int) -> int:
    epoch: int = connection.execute("SELECT epoch FROM lease_queue WHERE queue_id = ?", (queue_id,)).fetchone()[0]
    return epoch


def _generation(connection: sqlite3.Connection, subscription: Subscription) -> int:
    """The lowest mode generation that may still grant; 0 where none was ever set."""
    row = connection.execute("SELECT generation FROM lease_mode WHERE topic = ? AND name = ?", subscription).fetchone()
    return 0 if row is None else row[0]


def remaining_seconds(record: LeaseRecord, now: float) -> float:
    return max(0.0, record.visible_at - now)
