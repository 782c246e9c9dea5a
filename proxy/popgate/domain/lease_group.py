"""Lease groups: batches with a fixed membership that can be read repeatedly (decision 12).

Pure. A group is named by (stream, epoch). Its members are ordinary leases that share one lease id, so ``lease`` governs
their exclusion, fencing, expiry and settlement. A group only adds the list of leases that belong together, and their
order.

            PUT begins             PUT ends, with members            ack through its epoch
    (none) ------------> FORMING ------------------------> FROZEN ------------------------> gone; its epoch is 410
                          |  ^ |                             |
                          |  +-+ a repeated PUT continues    | release
                          v                                  v
            PUT ends, without members: gone              RELEASING ---> gone; its epoch may be used again

No client has read a group that is FORMING. If its forming is abandoned, its messages are released.
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


class GroupState(StrEnum):
    FORMING = "forming"
    FROZEN = "frozen"
    RELEASING = "releasing"


class GroupKey(NamedTuple):
    """The name of one lease group."""

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


def taken_over(key: GroupKey) -> Conflict:
    return Conflict(
        f"another request took over the lease group of epoch {key.epoch}; repeat this request to get its current state"
    )


def slice_bounds(number: int, slices: int, span: int) -> tuple[int, int]:
    """Return the positions [first, end) of a slice: equal contiguous parts, so that a slice keeps the group's order.

    ``span`` is the number of positions when the group was frozen; members lost later do not shift the others.
    """
    return number * span // slices, (number + 1) * span // slices


def lease_end(now: float, seconds: float, held_since: float, age_seconds_max: float) -> float:
    """Return when leases renewed for ``seconds`` from now end: at most ``age_seconds_max`` after ``held_since``."""
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
    """Return the record under which a member continues until ``ends_at``; None if the member is lost.

    The group's lease is extended, even if it has expired, as long as no other lease was granted since. This
    does not count as a new delivery. With ``regrant``, a message whose other lease was released or has expired is
    leased again, as by a pop. If ``is_overtaken`` (the mode generation changed), only leases that have not expired
    continue.
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
