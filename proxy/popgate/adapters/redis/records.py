"""Lease records in Redis: reads what ``scripts/records.lua`` writes, and converts the units.

In scripts times and durations are whole microseconds; here, as in the port, seconds.
"""

from collections.abc import Sequence
from typing import Any

from popgate.domain.lease import LeaseRecord, RecordState, SettleStatus
from popgate.domain.names import Subscription

_STATES = (
    RecordState.LEASED,
    RecordState.EXPIRED,
    RecordState.RELEASED,
    RecordState.MOVING,
    RecordState.ACKED,
    RecordState.DEAD,
    RecordState.DISCARDED,
)
"""States in the order of their numbers in Redis: append only."""

SETTLE_STATUSES = (SettleStatus.DONE, SettleStatus.ALREADY, SettleStatus.LOST)
"""Statuses in the order of their numbers in answers."""

MICROSECONDS = 1_000_000
FOREVER = 2**52
"""Microseconds of 142 years; Lua's numbers still hold such a time exactly."""


def microseconds(seconds: float) -> int:
    """Return ``seconds``, a duration or a time, in whole microseconds, at most ``FOREVER``."""
    return round(seconds * MICROSECONDS) if abs(seconds) < FOREVER / MICROSECONDS else FOREVER if seconds > 0 else 0


def subscription_key(subscription: Subscription) -> str:
    """Return the subscription as one string; names contain no slash."""
    return f"{subscription.topic}/{subscription.group}"


def restored(record: LeaseRecord, remaining: float) -> tuple[object, ...]:
    """Return a record as ``restore`` of ``scripts/queues.lua`` takes it, visible in ``remaining`` seconds."""
    return (
        _STATES.index(record.state),
        record.lease_id,
        microseconds(record.leased_at),
        microseconds(remaining),
        record.delivery_count,
        microseconds(record.first_delivered_at),
        record.epoch,
        record.target or False,
        record.target_copy_id or False,
        record.reason,
    )


def read_records(rows: Sequence[Sequence[Any]]) -> list[LeaseRecord | None]:
    """Return the records of a reply, by the index that it uses; index 0 is none."""
    return [None, *map(_record, rows)]


def _record(row: Sequence[Any]) -> LeaseRecord:
    state, lease_id, leased_at, visible_after, count, first_after, changed_after, epoch, *move = row
    target, target_copy_id, reason = move or (None, None, "")
    return LeaseRecord(
        _STATES[state],
        lease_id,
        (leased_at + visible_after) / MICROSECONDS,
        count,
        (leased_at + first_after) / MICROSECONDS,
        (leased_at + changed_after) / MICROSECONDS,
        epoch,
        leased_at / MICROSECONDS,
        target or None,
        target_copy_id or None,
        reason,
    )
