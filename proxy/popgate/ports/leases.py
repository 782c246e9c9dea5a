"""The state port's lease half: conditional writes on lease records, claims, and nothing else.

Every call is one atomic step, so a zombie proxy, a forwarded request and a lost response all meet the same fence
(design: "The lease record carries all of this"). Times inside are the store's; callers send and get durations.
All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed.

A store may lose its data and go on. The owner of a queue then writes back what it remembers (``restore``) before it
grants anything; what it doesn't remember comes again. Until then a settlement of what the store has no record of raises
StateUnavailable, where the store can tell that by the claim that is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAction, SettleAnswer
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, Subscription


class GrantEntry(NamedTuple):
    """One copy that a pop wants to lease. ``epoch`` is this proxy's claim on ``queue``.

    ``earlier_deliveries`` (the broker's lower bound) counts only where the store holds no record of the copy. Of those
    that have one ``line``, other than 0, each is given only if all before it are, or are settled: else it is BEHIND.
    """

    queue: BrokerQueue
    epoch: int
    copy_id: CopyId
    earlier_deliveries: int
    line: int = 0


class GroupPart(NamedTuple):
    """The lease group that a batch is leased for. ``builder`` names the PUT that forms it."""

    key: GroupKey
    builder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """One pop batch; all leases it gives share ``lease_id``, which is never used for another pop.

    ``attempt_id`` ties the leases to the client's attempt, for ``find_attempt``; batches of one attempt add up.
    ``group``: what is granted becomes members of that lease group, in the same atomic step, and each copy once: a
    member whose lease ran out before goes on under it, without a new delivery.
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
    """One settlement. ``seconds`` is the extension or the delay; target and reason are for moves.

    ``age_seconds_max``: no extension lets the lease grow older; what is longer is cut, and one that is as old is LOST.
    ``under``: the mode generation it is asked under. Where grants need a later one it is overtaken: a release is LOST,
    and so is the extension of a lease that ran out.
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
    """A live lease that an earlier pop with the same attempt id was given."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


class LeaseStore(Protocol):
    def unavailable_reason(self) -> str | None:
        """Why nothing can be written right now, or None: for /readyz."""
        ...

    async def claim(self, queue: BrokerQueue) -> int:
        """Become the owner of ``queue``: returns its new epoch, higher than every earlier one.

        The records of transient copies are dropped: their channel ended with the former owner.
        """
        ...

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        """``claim`` for the owner whose last epoch is ``above``, after a loss of data: first write back ``records``,
        those of transient copies included, where the store has none; the new epoch is higher than ``above``, too.

        ``remaining_seconds`` says when each is visible; its ``visible_at`` does not count, and it changed now. A store
        that can't lose its data without its process has no use for it, and does the same.
        """
        ...

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        """From now on grants on ``subscription`` need this mode generation; it only grows (design: section 4). The one
        that they need now; 0 where none was ever set."""
        ...

    async def load(self, queue: BrokerQueue) -> list[LoadedRecord]:
        """All records of ``queue`` that are not settled."""
        ...

    async def peek(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> dict[CopyId, LeaseRecord]:
        """The records of those of ``copy_ids`` that have one, settled ones included."""
        ...

    async def grant(self, request: GrantRequest) -> list[GrantAnswer]:
        """One answer an entry, in order. An entry whose epoch is overtaken answers FENCED, and all entries
        answer WRONG_MODE where the mode generation is.

        Raises: LeaseGroupAcked, Conflict where ``request.group`` is no longer formed by this builder; nothing is given.
        """
        ...

    async def settle(self, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
        """One answer an entry, in order; entries on the same copy take effect one after the other."""
        ...

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        """The leases of an attempt that still hold, in the order they were given."""
        ...

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        """Drop settled records that changed before ``settled_before`` (store time: the broker proved their acks) and
        more than ``older_than_seconds`` ago, but none of copies that may stand at the broker twice (``ports.dedup``).
        Returns how many."""
        ...

    async def collect(self, *, older_than_seconds: float) -> int:
        """Drop whatever has not changed for that long, on any queue: the last resort. Returns how many."""
        ...

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        """Drop records of transient copies whose channel ended."""
        ...

    async def drop_queue(self, queue: BrokerQueue) -> None:
        """Drop every record of a deleted queue. Its epoch stays: it only grows."""
        ...
