"""Runs grants and settlements in one job each: reads the lease records, and writes the changed records.

This module chooses the rows that a decision needs, and stores the result of the decision. ``domain.lease`` decides.
"""

import sqlite3
from collections.abc import Sequence

from popgate.adapters.sqlite.attempts import add_to_attempt
from popgate.adapters.sqlite.lease_group_rows import add_members, formed_group
from popgate.adapters.sqlite.lease_records import Key, LatestRecords
from popgate.domain.lease import (
    GrantAnswer,
    GrantStatus,
    LeaseRecord,
    SettleAnswer,
    SettleStatus,
    decide_grant,
    decide_settle,
)
from popgate.ports.leases import GrantRequest, SettleEntry

_FENCED = GrantAnswer(GrantStatus.FENCED, 0.0, None)
_WRONG_MODE = GrantAnswer(GrantStatus.WRONG_MODE, 0.0, None)
_BEHIND = GrantAnswer(GrantStatus.BEHIND, 0.0, None)
_LETS_OTHERS_PASS = (GrantStatus.GRANTED, GrantStatus.SETTLED)
"""Answers for a message after which the next message of the same line (ordering key) may be granted."""


def grant(
    connection: sqlite3.Connection, table: LatestRecords, request: GrantRequest, queue_ids: Sequence[int], now: float
) -> list[GrantAnswer]:
    """Decide about ``request``, and store the granted leases. Raises: LeaseGroupAcked, Conflict.

    ``queue_ids[i]`` is the id of the queue of ``request.entries[i]``. Return one answer for each entry, in the
    same order.
    """
    entries = request.entries
    group = None if request.group is None else formed_group(connection, request.group)
    if table.generation(connection, request.subscription) > request.mode_generation:
        return [_WRONG_MODE] * len(entries)
    epochs = {queue_id: table.epoch(connection, queue_id) for queue_id in set(queue_ids)}
    keys = [(queue_id, entry.copy_id) for queue_id, entry in zip(queue_ids, entries, strict=True)]
    records = table.read(connection, keys)
    former = {} if group is None else dict(records)
    answers: list[GrantAnswer] = []
    changed: dict[Key, LeaseRecord] = {}
    first: dict[tuple[int, int], GrantAnswer] = {}  # equal new copies share one record object
    held_up: set[int] = set()
    """Lines (ordering keys) that contain a message which was not granted. Later messages of these lines must wait."""
    for (_, epoch, _, earlier, line), key in zip(entries, keys, strict=True):
        if epoch < epochs[key[0]]:
            answers.append(_FENCED)
            continue
        if line in held_up:
            answers.append(_BEHIND)
            continue
        record = records.get(key)
        answer = first.get((epoch, earlier)) if record is None else None
        if answer is None:
            answer = decide_grant(
                record,
                now=now,
                lease_id=request.lease_id,
                invisibility_seconds=request.invisibility_seconds,
                max_deliveries=request.max_deliveries,
                earlier_deliveries=earlier,
                epoch=epoch,
                expired_attempts=request.expired_attempts,
            )
            if record is None:
                first[epoch, earlier] = answer
        if answer.status is GrantStatus.GRANTED and answer.record is not None:
            records[key] = changed[key] = answer.record
        if line and answer.status not in _LETS_OTHERS_PASS:
            held_up.add(line)
        answers.append(answer)
    table.write(connection, changed)
    if group is not None and changed:
        add_members(connection, group, changed, former, now + request.invisibility_seconds)
    if request.attempt_id is not None and changed:
        ends_at = now + request.invisibility_seconds
        add_to_attempt(
            connection, request.subscription, request.attempt_id, request.lease_id, list(changed), now, ends_at
        )
    return answers


def settle(
    connection: sqlite3.Connection,
    table: LatestRecords,
    entries: Sequence[SettleEntry],
    queue_ids: Sequence[int],
    now: float,
) -> list[SettleAnswer]:
    """Settle ``entries``. Return one answer for each entry, in order.

    ``queue_ids[i]`` is the id of the queue of ``entries[i]``.
    """
    keys = [(queue_id, entry.copy_id) for queue_id, entry in zip(queue_ids, entries, strict=True)]
    records = table.read(connection, keys)
    answers: list[SettleAnswer] = []
    changed: dict[Key, LeaseRecord] = {}
    # Messages that were leased together share one record object, and so need only one decision. The keys of ``decided``
    # contain the Python id of a record. The values contain the record itself, so that Python does not reuse this id.
    decided: dict[tuple[object, ...], tuple[LeaseRecord | None, SettleAnswer]] = {}
    for entry, key in zip(entries, keys, strict=True):
        record = records.get(key)
        question = (id(record), *entry[2:])
        known = decided.get(question)
        if known is None:
            known = decided[question] = record, _decided(connection, table, record, entry, now)
        answer = known[1]
        if answer.status is SettleStatus.DONE and answer.record is not None:
            records[key] = changed[key] = answer.record
        answers.append(answer)
    table.write(connection, changed)
    return answers


def _decided(
    connection: sqlite3.Connection, table: LatestRecords, record: LeaseRecord | None, entry: SettleEntry, now: float
) -> SettleAnswer:
    _, _, lease_id, action, seconds, target, target_copy_id, reason, age_seconds_max, under = entry
    return decide_settle(
        record,
        action,
        now=now,
        lease_id=lease_id,
        seconds=seconds,
        target=target,
        target_copy_id=target_copy_id,
        reason=reason,
        age_seconds_max=age_seconds_max,
        is_overtaken=under is not None and table.generation(connection, under[0]) > under[1],
    )
