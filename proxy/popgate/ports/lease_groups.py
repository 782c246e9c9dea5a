"""Defines the lease-group part of the state port: ordered batches of leases that are settled together.

Theory of operation. The store has one row for each group, and one for each member of a group, beside the lease
records. Every call is one atomic step over at most ``STEP_MEMBERS_MAX`` members (a SQLite transaction; a Redis script
over one hash, one list and the records that it names). ``LeaseStore.grant`` writes the members in the same step that
grants their leases. So a message that is leased for a group is always a member of the group, and every member was
leased. Renewals and settlements of more members take several calls. Each call continues where the previous call ended.

Each stream has a watermark, ``acked_through``, which only grows. The groups with epochs up to the watermark are acked,
or are being acked.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.lease import LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GROUPS_MAX, STREAMS_MAX, GroupKey, GroupState
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, StreamName, Subscription

STEP_MEMBERS_MAX = 1_000
"""Maximum number of members in one step, so that other calls wait only some milliseconds for the step."""


class StoredGroup(NamedTuple):
    """One lease group as it is stored.

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
    """A member of a lease group: a copy and its position in the group.

    ``delivery_count`` and ``first_delivered_at`` have the values of the grant that made the copy a member, and do not
    change. ``record`` is the copy's current lease record, or None if the copy has none. ``remaining_seconds`` is the
    time until the copy becomes visible.
    """

    position: int
    queue: BrokerQueue
    copy_id: CopyId
    delivery_count: int
    first_delivered_at: float
    record: LeaseRecord | None
    remaining_seconds: float


class Renewal(NamedTuple):
    """The terms on which the leases of a group are renewed.

    ``ends_at``: the time at which the renewed leases end. It is a time of the store's clock, and the same for all steps
    of one renewal. ``regrant`` and ``max_deliveries`` are used as in ``domain.lease_group.decide_renewal``. If the
    store requires a later mode generation than ``mode_generation``, expired leases are not renewed.
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
    """The result of one step of a renewal. ``next_position``: where the next step must begin; None if no step is
    left."""

    members: Sequence[RenewedMember]
    next_position: int | None


class SettledMember(NamedTuple):
    queue: BrokerQueue
    copy_id: CopyId
    answer: SettleAnswer


class SettlementStep(NamedTuple):
    """The result of one step of a settlement.

    ``lost``: the number of members that were lost before, or whose answer is LOST. ``more``: whether ``settle_next``
    must be called again.
    """

    action: SettleAction
    members: Sequence[SettledMember]
    lost: int
    more: bool


class AckedSoFar(NamedTuple):
    """The numbers of members that have been acked, and that were lost, under the current watermark of a stream."""

    acked: int
    lost: int


class LeaseGroupStore(Protocol):
    async def begin(
        self,
        key: GroupKey,
        *,
        lease_id: LeaseId,
        builder: str,
        slices: int,
        groups_max: int = GROUPS_MAX,
        streams_max: int = STREAMS_MAX,
    ) -> StoredGroup:
        """Return the group. If it does not exist, create it as FORMING.

        ``builder`` names the request that forms the group. If the group is FORMING already, this request takes over
        from the earlier one. Raises: LeaseGroupAcked; QuotaExceeded if the subscription has ``groups_max`` groups;
        Conflict if the stream is new and the subscription has ``streams_max`` streams.
        """
        ...

    async def freeze(self, key: GroupKey, builder: str) -> StoredGroup | None:
        """Make a FORMING group FROZEN and return it. If the group has no members, delete it and return None.

        Members that were lost during the forming are not in the group, because no client has seen them. Raises:
        LeaseGroupAcked; Conflict if ``builder`` does not form the group.
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
        """Return the time, on the store's clock, at which the group's leases end if they are renewed for ``seconds``
        from now.

        The leases end at most ``age_seconds_max`` after ``held_seconds`` began. If the leases have expired,
        ``held_seconds`` begins again at 0. Raises: LeaseGroupAcked, LeaseGroupNotFound.
        """
        ...

    async def renew(self, key: GroupKey, first: int, renewal: Renewal) -> RenewalStep:
        """Renew the leases of the next members, beginning at position ``first``. A member that can't be renewed is
        lost.

        The last step sets the end of the group's leases to ``renewal.ends_at``. Raises the same errors as
        ``begin_renewal``.
        """
        ...

    async def begin_ack(
        self, subscription: Subscription, stream: StreamName, through: int, *, streams_max: int = STREAMS_MAX
    ) -> AckedSoFar:
        """Raise the watermark of the stream to ``through``.

        If the watermark is already ``through``, return what was settled so far. Otherwise return zeros. The call never
        lowers the watermark. Raises: Conflict if the stream is new and the subscription has ``streams_max`` streams.
        """
        ...

    async def begin_release(self, subscription: Subscription, stream: StreamName, after: int) -> None:
        """Make every group RELEASING that is not acked and has an epoch later than ``after``."""
        ...

    async def settle_next(self, subscription: Subscription, stream: StreamName) -> SettlementStep:
        """Settle the next members of a group that is RELEASING, or whose epoch is at most the watermark.

        When the group has no members left, it is deleted.
        """
        ...

    async def subscriptions(self) -> list[Subscription]:
        """Return the subscriptions that have lease groups. It may include others."""
        ...

    async def half_settled(self, subscription: Subscription) -> list[StreamName]:
        """Return the streams that have groups which ``settle_next`` must still settle."""
        ...

    async def collect(self, *, forming_seconds: float, older_than_seconds: float) -> None:
        """Make abandoned groups RELEASING, and delete unused streams that have no groups.

        A group is abandoned if its leases ended more than ``older_than_seconds`` ago. A FORMING group is abandoned if
        its leases ended, or if it was created and still has no members, more than ``forming_seconds`` ago. A stream
        without groups is deleted if it has not changed for ``older_than_seconds``.
        """
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Delete every group and stream of a deleted subscription."""
        ...
