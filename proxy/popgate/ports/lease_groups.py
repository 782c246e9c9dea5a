"""The state port's lease groups: which leases form a batch, in which order, and their settlement together.

Theory of operation. A group's row says what it is, its member rows which copies belong to it; both stand beside the
lease records, and every call is one atomic step over at most ``BITE`` members (a SQLite transaction; a Redis script
over one hash, one list and the records it names). Members are written by ``LeaseStore.grant``, in the very step that
gives their leases: so a leased message always has its group, and a member always was leased. What goes over many
members goes in bites, each of which leaves a state from which the same call goes on.

A stream's watermark, ``acked_through``, only grows; whatever is not above it is acked, or about to be.
All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.lease import LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GROUPS_MAX, GroupKey, GroupState
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, StreamName, Subscription

BITE = 1_000
"""Members of one step: other calls wait some milliseconds for it, not longer."""


class StoredGroup(NamedTuple):
    """One lease group. ``message_count``: members that it can be read with; ``lost``: those that went elsewhere.

    ``span``: positions are 0..span-1. ``remaining_seconds``: until the first of its leases ends, 0.0 where they have;
    ``age_seconds``: since it was created, ``held_seconds``: since it was leased without a break.
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
    """A copy and its place in the group. Count and time are those of the hand-out that made it a member: they stay.

    ``record`` is its lease record as it stands now, None where there is none, ``remaining_seconds`` what is left of it.
    """

    position: int
    queue: BrokerQueue
    copy_id: CopyId
    delivery_count: int
    first_delivered_at: float
    record: LeaseRecord | None
    remaining_seconds: float


class Renewal(NamedTuple):
    """How leases go on: until ``ends_at`` (the store's time, the same for all bites of one pass). Where grants
    need a later ``mode_generation``, no lease that ran out does."""

    ends_at: float
    regrant: bool
    max_deliveries: int | None
    mode_generation: int


class RenewedMember(NamedTuple):
    """``record`` is the lease that holds now; None where the member is lost."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord | None
    remaining_seconds: float


class RenewedBite(NamedTuple):
    """``next_position``: where the next bite begins; None where all members were seen."""

    members: Sequence[RenewedMember]
    next_position: int | None


class SettledMember(NamedTuple):
    queue: BrokerQueue
    copy_id: CopyId
    answer: SettleAnswer


class SettledBite(NamedTuple):
    """What one step settled. ``lost`` are members that were lost before, or answered LOST. ``more``: go on."""

    action: SettleAction
    members: Sequence[SettledMember]
    lost: int
    more: bool


class AckedSoFar(NamedTuple):
    """What was settled under a stream's present watermark."""

    acked: int
    lost: int


class LeaseGroupStore(Protocol):
    async def begin(
        self, key: GroupKey, *, lease_id: LeaseId, builder: str, slices: int, groups_max: int = GROUPS_MAX
    ) -> StoredGroup:
        """The group, made FORMING where it is not there. One that is FORMING is formed by ``builder`` from now on.

        Raises: LeaseGroupAcked; QuotaExceeded where the subscription has ``groups_max`` groups.
        """
        ...

    async def freeze(self, key: GroupKey, builder: str) -> StoredGroup | None:
        """End the forming. None: it has no members, and is gone.

        What was lost meanwhile nobody has been told of: it is no member. Raises: LeaseGroupAcked, Conflict.
        """
        ...

    async def find(self, key: GroupKey) -> StoredGroup | None:
        """Raises: LeaseGroupAcked."""
        ...

    async def groups(self, subscription: Subscription, stream: StreamName | None = None) -> list[StoredGroup]:
        """Those that are not acked, by stream and epoch."""
        ...

    async def member_count(self, key: GroupKey, first: int, end: int) -> int:
        """How many members that are not lost stand at positions [first, end)."""
        ...

    async def members(self, key: GroupKey, first: int, end: int) -> list[Member]:
        """The members at positions [first, end) that are not lost, in order, at most ``BITE``."""
        ...

    async def begin_renewal(self, key: GroupKey, *, seconds: float, age_seconds_max: float) -> float:
        """Until when its leases may go on (the store's time), should they be renewed for ``seconds`` from now.

        Where they have run out, the group counts as held from now on. Raises: LeaseGroupAcked, LeaseGroupNotFound.
        """
        ...

    async def renew(self, key: GroupKey, first: int, renewal: Renewal) -> RenewedBite:
        """Renew the leases of the next members from position ``first``; those that went elsewhere are lost for ever.

        The last bite makes ``renewal.ends_at`` the end of the group's leases. Raises as ``begin_renewal``.
        """
        ...

    async def begin_ack(self, subscription: Subscription, stream: StreamName, through: int) -> AckedSoFar:
        """Raise the watermark to ``through``; what was settled under it before, zeros where it stands elsewhere."""
        ...

    async def begin_release(self, subscription: Subscription, stream: StreamName, after: int) -> None:
        """Make every group with a later epoch RELEASING."""
        ...

    async def settle_next(self, subscription: Subscription, stream: StreamName) -> SettledBite:
        """Settle the next members of the groups below the watermark, or RELEASING; a group without members is gone."""
        ...

    async def half_settled(self) -> list[tuple[Subscription, StreamName]]:
        """The streams for which ``settle_next`` has something to do."""
        ...

    async def collect(self, *, forming_seconds: float, older_than_seconds: float) -> None:
        """Make RELEASING whose leases ended that long ago, and nobody came; forget streams without groups."""
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Forget every group and stream of a deleted subscription."""
        ...
