"""Defines the lease part of the state port: conditional writes on lease records, and claims.

Every call is one atomic step that compares the request with the stored record. So a proxy that has lost its queue, a
forwarded request, or the repetition of a request whose response was lost can't settle or lease a message wrongly
(decision 2). Stored times are times of the store's clock. Callers pass and receive durations. All calls raise
StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.

A store may lose its data and continue to run. The owner of a queue then writes back the records that it has in memory
(``restore``) before it grants any lease. Messages without a record are redelivered. A queue has no claim in the store
until its owner has called ``restore``. If the store can detect this, a settlement without a record raises
StateUnavailable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, Subscription


class GrantEntry(NamedTuple):
    """One copy that a pop wants to lease. ``epoch`` is the epoch of this proxy's claim on ``queue``.

    ``earlier_deliveries`` (the broker's lower bound) is used only if the store has no record of the copy. Entries with
    the same ``line``, other than 0, are granted in order: the answer is BEHIND unless all earlier entries of the line
    are granted or settled.
    """

    queue: BrokerQueue
    epoch: int
    copy_id: CopyId
    earlier_deliveries: int
    line: int = 0


class GroupPart(NamedTuple):
    """The lease group for which a batch is leased. ``builder`` names the PUT request that forms the group."""

    key: GroupKey
    builder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """A request for the leases of one pop batch.

    All leases that it grants share ``lease_id``, which is never used for another pop. ``attempt_id`` links the leases
    to the client's attempt, for ``find_attempt``. An attempt can have several batches. ``group``: if it is set, the
    granted copies become members of this lease group in the same atomic step. A copy becomes a member only once. If the
    lease of a member has expired, it is renewed, and this does not count as a new delivery. ``expired_attempts``: see
    ``domain.lease.decide_grant``.
    """

    subscription: Subscription
    lease_id: LeaseId
    entries: Sequence[GrantEntry]
    invisibility_seconds: float
    max_deliveries: int | None
    mode_generation: int
    attempt_id: str | None = None
    group: GroupPart | None = None
    expired_attempts: Mapping[LeaseId, str] | None = None


class SettleEntry(NamedTuple):
    """One settlement. ``seconds`` is the length of an extension or a delay. The target and the reason are for moves.

    ``age_seconds_max``: the maximum age of a lease after an extension. A longer extension is shortened, and an
    extension of a lease that has reached this age is LOST. ``under``: the subscription, and the mode generation that
    the caller knows. If the store requires a later generation, a release, or an extension of an expired lease, is LOST.
    """

    queue: BrokerQueue
    copy_id: CopyId
    lease_id: LeaseId
    action: SettleAction
    seconds: float = 0.0
    target: BrokerQueue | None = None
    target_copy_id: CopyId | None = None
    reason: str = ""
    age_seconds_max: float = inf
    under: tuple[Subscription, int] | None = None


class LoadedRecord(NamedTuple):
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


class AttemptLease(NamedTuple):
    """A valid lease that was granted to an earlier pop with the same attempt id."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


class LeaseStore(Protocol):
    def unavailable_reason(self) -> str | None:
        """Return the reason why the store can't write now, or None if it can. /readyz shows this reason."""
        ...

    async def claim(self, queue: BrokerQueue) -> int:
        """Claim ``queue`` for this proxy, and return the new epoch, which is higher than every earlier epoch of the
        queue.

        The records of transient copies are deleted, because the channel of the former owner has ended.
        """
        ...

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        """Claim ``queue`` after a loss of data, for the owner whose last epoch is ``above``, and return the new epoch.

        First, those of ``records`` that the store does not have are written back, including records of transient
        copies. The new epoch is also higher than ``above``. ``remaining_seconds`` determines when each copy is visible;
        ``visible_at`` is ignored, and ``changed_at`` becomes the present time. A store that can't lose its data while
        its process runs does not need this call, but must implement it with the same effect.
        """
        ...

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        """Require at least this mode generation for grants on ``subscription`` (decision 10).

        If a later generation is required already, nothing changes. Return the generation that grants need now, or 0 if
        no generation was ever set.
        """
        ...

    async def load(self, queue: BrokerQueue) -> list[LoadedRecord]:
        """Return all records of ``queue`` that are not settled."""
        ...

    async def peek(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> dict[CopyId, LeaseRecord]:
        """Return the existing records of ``copy_ids``, including settled ones."""
        ...

    async def grant(self, request: GrantRequest) -> list[GrantAnswer]:
        """Grant leases. Return one answer per entry, in order.

        The answer to an entry with an outdated epoch is FENCED. If the mode generation is outdated, the answer to every
        entry is WRONG_MODE. Raises: LeaseGroupAcked; Conflict if another builder forms ``request.group`` now. After an
        error, nothing is granted.
        """
        ...

    async def settle(self, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
        """Settle messages. Return one answer per entry, in order. Entries for one copy take effect one after the
        other."""
        ...

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        """Return the leases of an attempt that are still valid, in the order in which they were granted."""
        ...

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        """Delete old settled records of ``queue``, and return their number.

        A record is deleted if it changed before ``settled_before`` and more than ``older_than_seconds`` ago.
        ``settled_before`` is a time of the store's clock; the broker has proved that it applied all acks up to that
        time. Records of copies that the broker may have stored twice are not deleted (``ports.dedup``).
        """
        ...

    async def collect(self, *, older_than_seconds: float) -> int:
        """Delete the records of all queues that have not changed for ``older_than_seconds``. Return their number.

        This call is a last resort, for records that no other call deletes.
        """
        ...

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        """Delete the records of transient copies whose channel has ended."""
        ...

    async def drop_queue(self, queue: BrokerQueue) -> None:
        """Delete every record of a deleted queue. The queue's epoch stays, because epochs must only grow."""
        ...
