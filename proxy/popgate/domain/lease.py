"""The lease record: the one fence that every hand-out and every settlement has to pass.

Pure. The store reads a record, asks here, and writes the answer, all in one atomic step (a SQLite transaction; a Redis
script that repeats these two tables). Times are in the store's clock, so every proxy sees the same order.

                 grant                ack
      (none) ------------> LEASED ------------> ACKED
         ^                 |  ^  \\
         |    release/expire  |   \\ reject, or max_deliveries passed
         |                 v  |    v
         +------------- WAITING   MOVING ------> DEAD
           (visible_at)   ^         |     moved
                          +---------+ undo

Whatever is visible may be DISCARDED when its time to live is over.

An expired lease stays LEASED with a deadline in the past until somebody else gets the message or its retry delay is
written (WAITING, ``owned`` still true): until then its receipt handle is good, for an ack as well as for an extension.
But no extension makes a lease older than it may be (design: section 5): one that is too long is cut to that, and a
lease that has its age is extended no more. And where the consume mode has been changed no lease that ran out is
revived: a drain ends when there are none.
"""

from enum import StrEnum
from math import inf
from typing import NamedTuple

from popgate.domain.names import BrokerQueue, CopyId, LeaseId


class RecordState(StrEnum):
    LEASED = "leased"
    EXPIRED = "expired"
    """The lease ran out and a retry delay was set; its receipt handle may still settle."""
    RELEASED = "released"
    """The client gave the lease back; its receipt handle is void."""
    MOVING = "moving"
    """A dead-lettering or a redrive was begun: ``target`` and ``target_copy_id`` say which; it must be finished."""
    ACKED = "acked"
    DEAD = "dead"
    """Was moved to where ``target`` says; settled here."""
    DISCARDED = "discarded"
    """Its time to live ended while nobody had it leased."""


WITHDRAWN = LeaseId("withdrawn")
"""In place of the id of a lease that nobody was told of, and that was taken back."""

SETTLED_STATES = frozenset({RecordState.ACKED, RecordState.DEAD, RecordState.DISCARDED})
"""The message is done with on this queue: should it come again, it is acked and shown to nobody."""

GOOD_STATES = frozenset({RecordState.LEASED, RecordState.EXPIRED})
"""The receipt handle of the record's lease is good, though the lease may have run out: it may be extended, too."""


class LeaseRecord(NamedTuple):
    """The lease or the settlement of one copy. What ends in ``_at`` is in the store's seconds.

    A tuple, as the two answers below: one is made for every hand-out and every settlement, and this is the cheapest.
    """

    state: RecordState
    lease_id: LeaseId
    visible_at: float
    delivery_count: int
    first_delivered_at: float
    changed_at: float
    epoch: int
    """The claim under which the lease was given; part of its receipt handle."""
    leased_at: float
    """When the lease was given; extensions don't move it."""
    target: BrokerQueue | None = None
    target_copy_id: CopyId | None = None
    reason: str = ""


class GrantStatus(StrEnum):
    GRANTED = "granted"
    HELD = "held"
    """Leased to somebody, or waiting for its retry: attach it."""
    EXHAUSTED = "exhausted"
    """Handed out ``max_deliveries`` times already: move it to the dead letters."""
    MOVING = "moving"
    SETTLED = "settled"
    BEHIND = "behind"
    """One of its line that stands before it was not given: it has to wait for that one."""
    FENCED = "fenced"
    """This proxy's claim is overtaken: step down."""
    WRONG_MODE = "wrong_mode"
    """The group has a later mode generation than this proxy knows."""
    FULL = "full"
    """As many of the subscription are leased as may be, or others are to have theirs first (``ports.limits``)."""


class SettleAction(StrEnum):
    ACK = "ack"
    EXTEND = "extend"
    RELEASE = "release"
    WITHDRAW = "withdraw"
    """A release of what nobody was told of: it does not count as a delivery, and nothing that was decided by that count
    may follow under its lease."""
    EXPIRE = "expire"
    """The owner's deadline loop: the lease ran out and the message waits ``delay_seconds`` for its retry."""
    MOVE = "move"
    """Begin to dead-letter by the client's wish; finished by MOVED once the copy is confirmed."""
    EXHAUST = "exhaust"
    """Begin to dead-letter a message that is visible again and was handed out ``max_deliveries`` times."""
    MOVED = "moved"
    UNDO = "undo"
    """A begun move that the broker surely did not take: the message stays where it is, and is visible."""
    DISCARD = "discard"
    """A message that is visible again has outlived its time to live. Whoever had it last: the lease need not match."""


class SettleStatus(StrEnum):
    DONE = "done"
    ALREADY = "already"
    """The same lease did the same before."""
    LOST = "lost"
    """The lease is no longer current: never a false success."""


class GrantAnswer(NamedTuple):
    """What stands now for one copy, and for how many seconds from now on it stays invisible (never negative).

    ``record`` is None only for BEHIND, FENCED, FULL and WRONG_MODE, and new only for GRANTED: then it must be written.
    """

    status: GrantStatus
    remaining_seconds: float
    record: LeaseRecord | None


class SettleAnswer(NamedTuple):
    """What stands now for one settlement (``record`` None: nothing does), ``remaining_seconds`` until it is visible.

    ``settled_at`` is the store's time. ``record`` is new only for DONE: then it must be written.
    """

    status: SettleStatus
    remaining_seconds: float
    record: LeaseRecord | None
    settled_at: float


def decide_grant(
    record: LeaseRecord | None,
    *,
    now: float,
    lease_id: LeaseId,
    invisibility_seconds: float,
    max_deliveries: int | None,
    earlier_deliveries: int,
    epoch: int,
) -> GrantAnswer:
    """May this copy be handed out now? Gives the lease if so.

    Where the same lease asks again (that of a lease group which is being formed), it goes on if nobody took the message
    since it ran out: no new delivery. ``earlier_deliveries`` counts only where no record does: for copies whose history
    the store never saw.
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
    granted = LeaseRecord(RecordState.LEASED, lease_id, now + invisibility_seconds, count + 1, first, now, epoch, now)
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
    """May this lease do this? ``seconds`` is the extension, or the delay of a release or an expiry.

    ``age_seconds_max``: an extension does not let the lease grow older than that, and leaves what it has already.
    ``is_overtaken``: it is asked under a mode generation that is over, and so nothing is released, and no lease that
    ran out is extended.
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
            latest = max(latest, record.visible_at)  # it was given that long, under another policy
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
        reason=reason or record.reason,
    )
    return SettleAnswer(SettleStatus.DONE, remaining_seconds(changed, now), changed, now)


def remaining_seconds(record: LeaseRecord, now: float) -> float:
    """How long the copy stays invisible; never negative."""
    return max(0.0, record.visible_at - now)


def _unchanged(status: SettleStatus, record: LeaseRecord | None, now: float) -> SettleAnswer:
    return SettleAnswer(status, 0.0 if record is None else remaining_seconds(record, now), record, now)


_REPEATABLE = frozenset({SettleAction.EXTEND, SettleAction.EXPIRE})
_MOVES_DEADLINE = frozenset(
    {SettleAction.EXTEND, SettleAction.RELEASE, SettleAction.WITHDRAW, SettleAction.EXPIRE, SettleAction.UNDO}
)
_BEGINS_MOVE = frozenset({SettleAction.MOVE, SettleAction.EXHAUST})
_ONLY_VISIBLE = frozenset({SettleAction.EXPIRE, SettleAction.EXHAUST, SettleAction.DISCARD})
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
