"""Decides, from a copy's lease record, whether the copy may be leased and whether a lease may settle it.

Pure. Every grant and every settlement must pass these decisions. The store reads the record, decides, and writes the
new record, all in one atomic step: a SQLite transaction that calls these functions, or a Redis script that repeats them
in Lua. All times are times of the store's clock, so every proxy sees the same order of events.

                 grant                ack
      (none) ------------> LEASED ------------> ACKED
         ^                 |  ^  \\
         |    release/expire  |   \\ reject, or max_deliveries passed
         |                 v  |    v
         +------------- WAITING   MOVING ------> DEAD
           (visible_at)   ^         |     moved
                          +---------+ undo

In the diagram, WAITING stands for two states, EXPIRED and RELEASED. A visible message may become DISCARDED when its
time to live ends.

When a lease expires, its record stays LEASED, with a ``visible_at`` in the past, until the message is leased again. If
the owner of the queue sets a retry delay, the state becomes EXPIRED. In both states, the receipt handle of the lease is
still valid, also for an extension. No extension makes a lease older than the maximum age (decision 15): a longer
extension is shortened, and a lease of the maximum age can't be extended. After a change of the consume mode, expired
leases can't be extended, because a drain ends when no leases are left.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import inf
from typing import NamedTuple

from popgate.domain.attempts import EXPIRED_MARK, SEPARATOR, noted, without_attempt
from popgate.domain.names import BrokerQueue, CopyId, LeaseId


class RecordState(StrEnum):
    LEASED = "leased"
    EXPIRED = "expired"
    """The lease expired and a retry delay was set. The receipt handle may still settle the message."""
    RELEASED = "released"
    """The lease was released, or a move was undone. The receipt handle is invalid."""
    MOVING = "moving"
    """A move to the dead letters or a redrive has begun and must be finished. ``target`` and ``target_copy_id`` name
    its destination."""
    ACKED = "acked"
    DEAD = "dead"
    """The message was moved to ``target``, and is settled on this queue."""
    DISCARDED = "discarded"
    """The message's time to live ended while it was not leased."""


WITHDRAWN = LeaseId("withdrawn")
"""Replaces the lease id of a lease that was withdrawn before any client received it."""

SETTLED_STATES = frozenset({RecordState.ACKED, RecordState.DEAD, RecordState.DISCARDED})
"""States of messages that are settled on this queue. If the broker redelivers such a message, popgate acks it."""

GOOD_STATES = frozenset({RecordState.LEASED, RecordState.EXPIRED})
"""States in which the receipt handle of the record's lease is valid, even if the lease has expired."""


class LeaseRecord(NamedTuple):
    """The lease or the settlement of one copy. Fields that end in ``_at`` are in seconds of the store's clock.

    The record is a tuple, like ``GrantAnswer`` and ``SettleAnswer``, because every grant and settlement creates one,
    and tuples are the cheapest to create.
    """

    state: RecordState
    lease_id: LeaseId
    visible_at: float
    delivery_count: int
    first_delivered_at: float
    changed_at: float
    epoch: int
    """The epoch of the claim under which the lease was granted. It is part of the receipt handle."""
    leased_at: float
    """When the lease was granted. Extensions don't change this time."""
    target: BrokerQueue | None = None
    target_copy_id: CopyId | None = None
    reason: str = ""
    """Why the message is dead-lettered, and the attempts so far (``domain.attempts``)."""


class GrantStatus(StrEnum):
    GRANTED = "granted"
    HELD = "held"
    """The message is leased, or its retry delay is not over. The caller must update its message from the record."""
    EXHAUSTED = "exhausted"
    """The message was already delivered ``max_deliveries`` times: move it to the dead letters."""
    MOVING = "moving"
    SETTLED = "settled"
    BEHIND = "behind"
    """An earlier entry with the same ``line`` was neither granted nor settled, so this entry must wait."""
    FENCED = "fenced"
    """Another proxy has claimed the queue, so the calling proxy must stop serving it."""
    WRONG_MODE = "wrong_mode"
    """The group has a later mode generation than the calling proxy knows."""
    FULL = "full"
    """The subscription has its maximum number of leases, other proxies are ahead in line, or the store has not yet
    counted the leases (``ports.limits``)."""


class SettleAction(StrEnum):
    ACK = "ack"
    EXTEND = "extend"
    RELEASE = "release"
    WITHDRAW = "withdraw"
    """Release a lease that no client has received. The lease does not count as a delivery, and its lease id becomes
    invalid, so that no later action relies on the former delivery count."""
    EXPIRE = "expire"
    """Record that the lease expired, and set the retry delay to ``seconds``. The deadline loop of the queue's owner
    does this."""
    MOVE = "move"
    """Begin to dead-letter a message that the client rejected. MOVED finishes the move when the broker has confirmed
    the dead letter."""
    EXHAUST = "exhaust"
    """Begin to dead-letter a visible message that was delivered ``max_deliveries`` times."""
    MOVED = "moved"
    UNDO = "undo"
    """Undo a move whose new copy the broker certainly did not store. The message stays in its queue and becomes
    visible."""
    DISCARD = "discard"
    """Discard a visible message whose time to live is over. Any lease id is accepted."""


class SettleStatus(StrEnum):
    DONE = "done"
    ALREADY = "already"
    """An earlier settlement of the same lease has already had this effect."""
    LOST = "lost"
    """The lease is no longer current, so nothing was changed."""


class GrantAnswer(NamedTuple):
    """The answer to a grant: the copy's record, and the seconds for which the copy stays invisible (never negative).

    ``record`` is None only for BEHIND, FENCED, FULL and WRONG_MODE. For GRANTED, it is a new record that must be
    written. For every other status, it is the stored record.
    """

    status: GrantStatus
    remaining_seconds: float
    record: LeaseRecord | None


class SettleAnswer(NamedTuple):
    """The answer to a settlement: the copy's record, and the seconds until the copy is visible.

    ``record`` is None if the copy has no record. For DONE, it is a new record that must be written. ``settled_at`` is
    the store's time at the settlement.
    """

    status: SettleStatus
    remaining_seconds: float
    record: LeaseRecord | None
    settled_at: float


_EXPIRED = f"{SEPARATOR}{EXPIRED_MARK}"


def decide_grant(
    record: LeaseRecord | None,
    *,
    now: float,
    lease_id: LeaseId,
    invisibility_seconds: float,
    max_deliveries: int | None,
    earlier_deliveries: int,
    epoch: int,
    expired_attempts: Mapping[LeaseId, str] | None = None,
) -> GrantAnswer:
    """Decide whether a copy may be leased now. If so, the answer contains the record of the new lease.

    While a lease group is being formed, the same lease may be requested again. If this lease has expired, it is
    renewed, and this does not count as a new delivery. But if another lease of the copy was granted since it expired, a
    new lease is granted. ``earlier_deliveries`` is used only if ``record`` is None. ``expired_attempts``: by lease id,
    the description of the attempt that ended when this lease expired (``attempts.described``).
    """
    if record is None:
        count, first = earlier_deliveries, now
    else:
        if record.state in SETTLED_STATES:
            return GrantAnswer(GrantStatus.SETTLED, 0.0, record)
        if record.state is RecordState.MOVING:
            return GrantAnswer(GrantStatus.MOVING, 0.0, record)
        remaining = record.visible_at - now
        if remaining > 0.0:
            return GrantAnswer(GrantStatus.HELD, remaining, record)
        if record.lease_id == lease_id and record.state in GOOD_STATES:
            ends_at = now + invisibility_seconds
            goes_on = record._replace(state=RecordState.LEASED, visible_at=ends_at, changed_at=now)
            return GrantAnswer(GrantStatus.GRANTED, invisibility_seconds, goes_on)
        count, first = record.delivery_count, record.first_delivered_at if record.delivery_count else now
        if max_deliveries is not None and count >= max_deliveries:
            return GrantAnswer(GrantStatus.EXHAUSTED, 0.0, record)
        if record.reason or record.state is RecordState.LEASED:  # it keeps its attempts; the last one may have expired
            expired = (expired_attempts or {}).get(record.lease_id, _EXPIRED)
            return _granted_again(record, now, lease_id, invisibility_seconds, count, first, epoch, expired)
    granted = LeaseRecord(RecordState.LEASED, lease_id, now + invisibility_seconds, count + 1, first, now, epoch, now)
    return GrantAnswer(GrantStatus.GRANTED, invisibility_seconds, granted)


def _granted_again(
    record: LeaseRecord,
    now: float,
    lease_id: LeaseId,
    invisibility_seconds: float,
    count: int,
    first: float,
    epoch: int,
    expired: str,
) -> GrantAnswer:
    new = expired if record.state is RecordState.LEASED else ""
    reason = noted(record.reason, new, record.delivery_count, record.leased_at, record.visible_at)
    ends_at = now + invisibility_seconds
    granted = LeaseRecord(RecordState.LEASED, lease_id, ends_at, count + 1, first, now, epoch, now, reason=reason)
    return GrantAnswer(GrantStatus.GRANTED, invisibility_seconds, granted)


def decide_settle(
    record: LeaseRecord | None,
    action: SettleAction,
    *,
    now: float,
    lease_id: LeaseId,
    seconds: float = 0.0,
    target: BrokerQueue | None = None,
    target_copy_id: CopyId | None = None,
    reason: str = "",
    age_seconds_max: float = inf,
    is_overtaken: bool = False,
) -> SettleAnswer:
    """Decide whether the lease ``lease_id`` permits ``action``.

    ``seconds`` is the length of an extension, or the delay of a release or an expiry.

    ``age_seconds_max``: no extension makes the lease older than this maximum, but an extension never shortens a lease.
    ``is_overtaken``: the mode generation that the caller knows is outdated. Then a release, or an extension of an
    expired lease, is LOST.
    """
    if record is None or (record.lease_id != lease_id and action is not SettleAction.DISCARD):
        return _unchanged(SettleStatus.LOST, record, now)
    state = record.state
    if state is _RESULT[action] and action not in _REPEATABLE:
        return _unchanged(SettleStatus.ALREADY, record, now)
    if state not in _ALLOWED_FROM[action] or (action in _ONLY_VISIBLE and record.visible_at > now):
        return _unchanged(SettleStatus.LOST, record, now)
    visible_at = now + seconds if action in _MOVES_DEADLINE else record.visible_at
    if is_overtaken and action is SettleAction.RELEASE:
        return _unchanged(SettleStatus.LOST, record, now)
    if action is SettleAction.EXTEND:
        latest = record.leased_at + age_seconds_max
        if state is RecordState.LEASED:
            latest = max(latest, record.visible_at)  # an earlier policy may have allowed a longer lease
        is_over = state is not RecordState.LEASED or record.visible_at <= now
        if latest <= now or (is_over and is_overtaken):
            return _unchanged(SettleStatus.LOST, record, now)
        visible_at = min(visible_at, latest)
    begins_move = action in _BEGINS_MOVE
    changed = LeaseRecord(
        state=_RESULT[action],
        lease_id=WITHDRAWN if action is SettleAction.WITHDRAW else record.lease_id,
        visible_at=visible_at,
        delivery_count=record.delivery_count - (action is SettleAction.WITHDRAW),
        first_delivered_at=record.first_delivered_at,
        changed_at=now,
        epoch=record.epoch,
        leased_at=record.leased_at,
        target=target if begins_move else record.target,
        target_copy_id=target_copy_id if begins_move else record.target_copy_id,
        reason=_noted(record, reason, action, now) if reason else record.reason,
    )
    return SettleAnswer(SettleStatus.DONE, remaining_seconds(changed, now), changed, now)


def _noted(record: LeaseRecord, reason: str, action: SettleAction, now: float) -> str:
    """Return the new reason, with the attempt that ``reason`` describes. An expired attempt ended with its lease."""
    if action in _AFTER_LEASE:
        if record.state is not RecordState.LEASED:  # the attempt was recorded when it ended
            reason = without_attempt(reason)
        now = record.visible_at
    return noted(record.reason, reason, record.delivery_count, record.leased_at, now)


def remaining_seconds(record: LeaseRecord, now: float) -> float:
    """Return the seconds for which the copy stays invisible, never negative."""
    return max(0.0, record.visible_at - now)


def _unchanged(status: SettleStatus, record: LeaseRecord | None, now: float) -> SettleAnswer:
    return SettleAnswer(status, 0.0 if record is None else remaining_seconds(record, now), record, now)


_REPEATABLE = frozenset({SettleAction.EXTEND, SettleAction.EXPIRE})
_MOVES_DEADLINE = frozenset(
    {SettleAction.EXTEND, SettleAction.RELEASE, SettleAction.WITHDRAW, SettleAction.EXPIRE, SettleAction.UNDO}
)
_BEGINS_MOVE = frozenset({SettleAction.MOVE, SettleAction.EXHAUST})
_ONLY_VISIBLE = frozenset({SettleAction.EXPIRE, SettleAction.EXHAUST, SettleAction.DISCARD})
_AFTER_LEASE = frozenset({SettleAction.EXPIRE, SettleAction.EXHAUST})
_RESULT = {
    SettleAction.ACK: RecordState.ACKED,
    SettleAction.EXTEND: RecordState.LEASED,
    SettleAction.RELEASE: RecordState.RELEASED,
    SettleAction.WITHDRAW: RecordState.RELEASED,
    SettleAction.EXPIRE: RecordState.EXPIRED,
    SettleAction.MOVE: RecordState.MOVING,
    SettleAction.EXHAUST: RecordState.MOVING,
    SettleAction.MOVED: RecordState.DEAD,
    SettleAction.UNDO: RecordState.RELEASED,
    SettleAction.DISCARD: RecordState.DISCARDED,
}
_ALLOWED_FROM = {
    SettleAction.ACK: GOOD_STATES,
    SettleAction.EXTEND: GOOD_STATES,
    SettleAction.RELEASE: GOOD_STATES,
    SettleAction.WITHDRAW: GOOD_STATES,
    SettleAction.EXPIRE: frozenset({RecordState.LEASED}),
    SettleAction.MOVE: GOOD_STATES,
    SettleAction.EXHAUST: GOOD_STATES | {RecordState.RELEASED},
    SettleAction.MOVED: frozenset({RecordState.MOVING}),
    SettleAction.UNDO: frozenset({RecordState.MOVING}),
    SettleAction.DISCARD: GOOD_STATES | {RecordState.RELEASED},
}
