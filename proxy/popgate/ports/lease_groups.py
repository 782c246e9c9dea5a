"""Defines the lease-group part of the state port: ordered batches of leases that are settled together.

Theory of operation. A group has one row, and a row for each member copy. They are stored beside the lease records, and
every call is one atomic step over at most ``STEP_MEMBERS_MAX`` members (a SQLite transaction; a Redis script over one
hash, one list and the records that it names). ``LeaseStore.grant`` writes the members in the same step that grants
their leases. So a message leased for a group is always its member, and every member was leased. Operations on many
members take several steps; after each step, the same call can continue.

A stream's watermark, ``acked_through``, only grows; all epochs up to it are acked, or about to be.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.lease import LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GROUPS_MAX, GroupKey, GroupState
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, StreamName, Subscription

STEP_MEMBERS_MAX = 1_000
"""Maximum number of members in one step, so that other calls wait only some milliseconds for it."""


class StoredGroup(NamedTuple):
    """One lease group.

    ``message_count``: members that can be read; ``lost``: members that the group no longer holds. ``span``: the
    positions of its members are in 0..span-1. ``remaining_seconds``: time until the earliest end of a lease in the
    group, 0.0 if that time has passed. ``age_seconds``: time since its creation. ``held_seconds``: how long it has been
    leased without a break.
    """

    stream: StreamName
    epoch: int
    state: GroupState
    lease_id: LeaseId
    slices: int
    span: int
    message_count: int
    lost: int
    remaining_seconds: float
    age_seconds: float
    held_seconds: float


class Member(NamedTuple):
    """A copy and its position in the group.

    ``delivery_count`` and ``first_delivered_at`` are those of the grant that made it a member, and stay. ``record`` is
    its current lease record, None if there is none; ``remaining_seconds`` is what is left of the lease.
    """

    position: int
    queue: BrokerQueue
    copy_id: CopyId
    delivery_count: int
    first_delivered_at: float
    record: LeaseRecord | None
    remaining_seconds: float


class Renewal(NamedTuple):
    """The terms of a renewal: leases continue until ``ends_at`` (the store's time, the same for all steps of one pass).

    If grants need a later generation than ``mode_generation``, expired leases do not continue.
    """

    ends_at: float
    regrant: bool
    max_deliveries: int | None
    mode_generation: int


class RenewedMember(NamedTuple):
    """A member after its renewal. ``record`` is its valid lease; None if the member is lost."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord | None
    remaining_seconds: float


class RenewalStep(NamedTuple):
    """The result of one step of a renewal. ``next_position``: where the next step begins; None if this was the last."""

    members: Sequence[RenewedMember]
    next_position: int | None


class SettledMember(NamedTuple):
    queue: BrokerQueue
    copy_id: CopyId
    answer: SettleAnswer


class SettlementStep(NamedTuple):
    """The result of one step of a settlement. ``lost``: members that were lost before, or answered LOST. ``more``: call
    again."""

    action: SettleAction
    members: Sequence[SettledMember]
    lost: int
    more: bool


class AckedSoFar(NamedTuple):
    """The number of members settled under a stream's current watermark."""

    acked: int
    lost: int


class LeaseGroupStore(Protocol):
    async def begin(
        self, key: GroupKey, *, lease_id: LeaseId, builder: str, slices: int, groups_max: int = GROUPS_MAX
    ) -> StoredGroup:
        """Return the group; create it as FORMING if it does not exist. ``builder`` takes over a group that is FORMING.

        Raises: LeaseGroupAcked; QuotaExceeded if the subscription has ``groups_max`` groups.
        """
        ...

    async def freeze(self, key: GroupKey, builder: str) -> StoredGroup | None:
        """End the forming and return the group; None if it had no members and was removed.

        Members that were lost meanwhile are dropped; no client knows them yet. Raises: LeaseGroupAcked, Conflict.
        """
        ...

    async def find(self, key: GroupKey) -> StoredGroup | None:
        """Return the group, or None if it does not exist. Raises: LeaseGroupAcked."""
        ...

    async def groups(self, subscription: Subscription, stream: StreamName | None = None) -> list[StoredGroup]:
        """Return the groups that are not acked, sorted by stream and epoch."""
        ...

    async def member_count(self, key: GroupKey, first: int, end: int) -> int:
        """Return how many members at positions [first, end) are not lost."""
        ...

    async def members(self, key: GroupKey, first: int, end: int) -> list[Member]:
        """Return the members at positions [first, end) that are not lost, in order, at most ``STEP_MEMBERS_MAX``."""
        ...

    async def begin_renewal(self, key: GroupKey, *, seconds: float, age_seconds_max: float) -> float:
        """Return until when its leases continue (the store's time) if they are renewed for ``seconds`` from now.

        If they have expired, ``held_seconds`` starts again at 0. Raises: LeaseGroupAcked, LeaseGroupNotFound.
        """
        ...

    async def renew(self, key: GroupKey, first: int, renewal: Renewal) -> RenewalStep:
        """Renew the leases of the next members from position ``first``. A member that can't be renewed is lost.

        The last step sets the end of the group's leases to ``renewal.ends_at``. Raises the same as ``begin_renewal``.
        """
        ...

    async def begin_ack(self, subscription: Subscription, stream: StreamName, through: int) -> AckedSoFar:
        """Raise the watermark to ``through``; return what was settled if it stood there already, else zeros."""
        ...

    async def begin_release(self, subscription: Subscription, stream: StreamName, after: int) -> None:
        """Make every unacknowledged group with an epoch later than ``after`` RELEASING."""
        ...

    async def settle_next(self, subscription: Subscription, stream: StreamName) -> SettlementStep:
        """Settle the next members of groups up to the watermark, or RELEASING; remove a group without members."""
        ...

    async def half_settled(self) -> list[tuple[Subscription, StreamName]]:
        """Return the streams for which ``settle_next`` has work."""
        ...

    async def collect(self, *, forming_seconds: float, older_than_seconds: float) -> None:
        """Make groups RELEASING whose leases ended that long ago without a request; forget streams without groups."""
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Forget every group and stream of a deleted subscription."""
        ...
