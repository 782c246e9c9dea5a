"""Converts lease records between the format of the scripts (``scripts/records.lua``) and ``LeaseRecord``.

The scripts express times and durations in whole microseconds. Python expresses them in seconds.
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
"""The record states. The index of a state is its number in Redis, so new states must be appended."""

SETTLE_STATUSES = (SettleStatus.DONE, SettleStatus.ALREADY, SettleStatus.LOST)
"""The results of a settlement. The index of a status is its number in the answers of scripts."""

MICROSECONDS = 1_000_000
FOREVER = 2**52
"""Maximum duration in microseconds: 142 years. Lua's numbers can represent it exactly."""


def microseconds(seconds: float) -> int:
    """Convert ``seconds``, a duration or a time, to whole microseconds. The result is at most ``FOREVER``."""
    return round(seconds * MICROSECONDS) if abs(seconds) < FOREVER / MICROSECONDS else FOREVER if seconds > 0 else 0


def subscription_key(subscription: Subscription) -> str:
    """Return ``topic/group`` as the key of a subscription. The key is unique, because names contain no slash."""
    return f"{subscription.topic}/{subscription.group}"


def restored(record: LeaseRecord, remaining: float) -> tuple[object, ...]:
    """Return a record as an argument of the script function ``restore`` (``scripts/queues.lua``).

    ``remaining`` is the number of seconds until the record's message becomes visible.
    """
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
    """Return the records of a script's answer as a list. The answer refers to them by index; 0 means no record."""
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
