"""Decides about lease groups: fixed batches of leased messages that a client can read repeatedly (decision 12).

Pure. A group is named by (stream, epoch). Its members are ordinary leases that share one lease id, so ``domain.lease``
decides about their exclusion, fencing, expiry and settlement. A group adds only the list of its leases and their order.

            PUT begins             PUT ends, with members            ack through its epoch
    (none) ------------> FORMING ------------------------> FROZEN ------------------------> gone; its epoch is 410
                          |  ^ |                             |
                          |  +-+ a repeated PUT continues    | release
                          v                                  v
            PUT ends, without members: gone              RELEASING ---> gone; its epoch may be used again

No client has read a group that is FORMING. If no request continues to form the group, its messages are released.
"""

from enum import StrEnum
from typing import NamedTuple

from popgate.domain.errors import Conflict, LeaseGroupAcked, LeaseGroupNotFound
from popgate.domain.lease import (
    GrantStatus,
    LeaseRecord,
    SettleAction,
    SettleStatus,
    decide_grant,
    decide_settle,
)
from popgate.domain.names import LeaseId, StreamName, Subscription

GROUP_MESSAGES_MAX = 100_000
SLICES_MAX = 1_024
EPOCH_MAX = 2**63 - 1
GROUPS_MAX = 1_000
"""Default maximum number of unacknowledged lease groups of one subscription."""
STREAMS_MAX = 10_000
"""Maximum number of streams of one subscription. The store remembers which epochs of each stream were acked."""


class GroupState(StrEnum):
    FORMING = "forming"
    FROZEN = "frozen"
    RELEASING = "releasing"


class GroupKey(NamedTuple):
    """The identity of one lease group."""

    subscription: Subscription
    stream: StreamName
    epoch: int


def epoch_acked(key: GroupKey, acked_through: int) -> LeaseGroupAcked:
    return LeaseGroupAcked(
        f"epoch {key.epoch} of stream {key.stream!r} was acked, like all epochs through {acked_through}; "
        "lease a later epoch"
    )


def no_group(key: GroupKey) -> LeaseGroupNotFound:
    return LeaseGroupNotFound(
        f"stream {key.stream!r} has no lease group of epoch {key.epoch}; create it with PUT (it may have been empty)"
    )


def too_many_streams(streams_max: int) -> Conflict:
    return Conflict(
        f"the group has {streams_max} streams of lease groups, and can't have more; use fewer names (a stream is "
        "forgotten 30 days after its last use), or delete the group"
    )


def taken_over(key: GroupKey) -> Conflict:
    return Conflict(
        f"another request took over the lease group of epoch {key.epoch}; repeat this request to get its current state"
    )


def slice_bounds(number: int, slices: int, span: int) -> tuple[int, int]:
    """Return the positions [first, end) of slice ``number``.

    All slices are contiguous and almost equally long, so that each slice keeps the order of the group. ``span`` is the
    number of positions when the group was frozen. Members that are lost later do not change the positions of the
    others.
    """
    return number * span // slices, (number + 1) * span // slices


def lease_end(now: float, seconds: float, held_since: float, age_seconds_max: float) -> float:
    """Return the time at which leases end if they are renewed for ``seconds`` from ``now``.

    This time is at most ``age_seconds_max`` after ``held_since``.
    """
    return min(now + seconds, held_since + age_seconds_max)


def decide_renewal(
    record: LeaseRecord | None,
    *,
    now: float,
    lease_id: LeaseId,
    ends_at: float,
    is_overtaken: bool,
    regrant: bool,
    max_deliveries: int | None,
) -> LeaseRecord | None:
    """Return the record that leases a member until ``ends_at``, or None if the member is lost.

    The group's lease of the member is extended, even if it has expired, unless another lease was granted since then.
    The extension does not count as a new delivery. With ``regrant``, a message is leased again, as by a pop, if the
    group's lease can't be extended but the message is visible. If ``is_overtaken`` (the mode generation changed), only
    leases that have not expired are extended.
    """
    if record is None:
        return None
    seconds = ends_at - now
    status, _, extended, _ = decide_settle(
        record, SettleAction.EXTEND, now=now, lease_id=lease_id, seconds=seconds, is_overtaken=is_overtaken
    )
    if status is SettleStatus.DONE:
        return extended
    if is_overtaken or not regrant:
        return None
    granted, _, again = decide_grant(
        record,
        now=now,
        lease_id=lease_id,
        invisibility_seconds=seconds,
        max_deliveries=max_deliveries,
        earlier_deliveries=0,
        epoch=record.epoch,
    )
    return again if granted is GrantStatus.GRANTED else None
