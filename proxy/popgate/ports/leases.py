"""Defines the lease part of the state port: conditional writes on lease records, and claims.

Every call is one atomic step, so a zombie proxy, a forwarded request and a lost response all meet the same fence
(decision 2). Stored times are times of the store's clock. Callers pass and receive durations.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.

A store may lose its data and continue. The owner of a queue then writes back the records that it remembers
(``restore``) before it grants anything. Other messages are redelivered. Until the records are restored, a
settlement without a record raises StateUnavailable if the store can detect the loss by the missing claim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, Subscription


class GrantEntry(NamedTuple):
    """One copy that a pop wants to lease. ``epoch`` is the epoch of this proxy's claim on ``queue``.

    ``earlier_deliveries`` (the broker's lower bound) is used only if the store has no record of the copy. Entries with
    the same ``line``, other than 0, are granted in order: an entry is BEHIND unless all before it are granted or
    settled.
    """

    queue: BrokerQueue
    epoch: int
    copy_id: CopyId
    earlier_deliveries: int
    line: int = 0


class GroupPart(NamedTuple):
    """The lease group for which a batch is leased. ``builder`` names the PUT that forms it."""

    key: GroupKey
    builder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """One pop batch. All leases that it grants share ``lease_id``, which is never used for another pop.

    ``attempt_id`` links the leases to the client's attempt, for ``find_attempt``. An attempt can have several batches.
    ``group``: the granted copies become members of that lease group, in the same atomic step and each copy once. The
    expired lease of a member is renewed, and does not count as a new delivery.
    """

    subscription: Subscription
    lease_id: LeaseId
    entries: Sequence[GrantEntry]
    invisibility_seconds: float
    max_deliveries: int | None
    mode_generation: int
    attempt_id: str | None = None
    group: GroupPart | None = None


class SettleEntry(NamedTuple):
    """One settlement. ``seconds`` is the extension or the delay. The target and the reason are for moves.

    ``age_seconds_max``: the maximum age of a lease after an extension. A longer extension is cut to this age, and the
    extension of a lease that has reached it is LOST. ``under``: the mode generation that the caller knows. If grants
    need a later generation, a release, and the extension of an expired lease, are LOST.
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
    """A live lease that was granted to an earlier pop with the same attempt id."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


class LeaseStore(Protocol):
    def unavailable_reason(self) -> str | None:
        """Return why the store can't write right now, or None; for /readyz."""
        ...

    async def claim(self, queue: BrokerQueue) -> int:
        """Become the owner of ``queue`` and return its new epoch, which is higher than every earlier one.

        The records of transient copies are dropped, because their channel ended with the former owner.
        """
        ...

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        """Claim ``queue`` after a loss of data, for the owner whose last epoch is ``above``.

        First writes back each of ``records``, including those of transient copies, that the store does not have. The
        new epoch is also higher than ``above``. ``remaining_seconds`` determines when each copy is visible;
        ``visible_at`` is ignored, and ``changed_at`` becomes now. For a store that can't lose its data while its
        process runs, this call is not needed, but has the same effect.
        """
        ...

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        """Require this mode generation for grants on ``subscription``, if it is the latest one (decision 10).

        Return the generation that grants need now, or 0 if no generation was ever set.
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
        """Settle. Return one answer per entry, in order. Entries on the same copy take effect one after the other."""
        ...

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        """Return the leases of an attempt that are still valid, in the order in which they were granted."""
        ...

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        """Drop old settled records of ``queue``, and return how many.

        A record is dropped if it changed before ``settled_before`` (store time: the broker has proved the acks up to
        that time) and more than ``older_than_seconds`` ago. Records of copies that the broker may have twice are kept
        (``ports.dedup``).
        """
        ...

    async def collect(self, *, older_than_seconds: float) -> int:
        """Drop records of any queue that have not changed for this time. Return how many. This is a last resort."""
        ...

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        """Drop the records of transient copies whose channel has ended."""
        ...

    async def drop_queue(self, queue: BrokerQueue) -> None:
        """Drop every record of a deleted queue. Keep the queue's epoch, because epochs only grow."""
        ...
