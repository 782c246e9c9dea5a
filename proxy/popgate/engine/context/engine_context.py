"""Contains the objects that all parts of the engine share: the ports, the timer, the memory budget and the options.

This module contains no logic of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from popgate.domain.errors import TooManyPops
from popgate.domain.message import copy_id_minter
from popgate.domain.names import BrokerQueue, CopyId, LeaseId
from popgate.domain.quotas import DEFAULTS, Quotas
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.routing import Router
from popgate.ports.assignments import Assignments
from popgate.ports.broker import Broker
from popgate.ports.catalog import Catalog
from popgate.ports.clock import Clock
from popgate.ports.dedup import AtomicPublisher, DedupStore
from popgate.ports.journal import Journal
from popgate.ports.lease_groups import LeaseGroupStore
from popgate.ports.leases import LeaseStore
from popgate.runtime.background import Background
from popgate.runtime.deadlines import Deadlines
from popgate.runtime.faults import Faults
from popgate.runtime.shared_clock import SharedClock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of the engine.

    ``instance`` identifies this start of the process. It is unique, and contains no host name. The first of the
    ``secrets`` signs receipt handles, and handles of all of them are valid.
    """

    instance: str
    secrets: Sequence[bytes] = field(repr=False)
    auto_create: bool
    auto_create_queues: int = 4
    buffer_bytes_max: int = 256 * 1024 * 1024
    idle_return_seconds: float = 30.0
    dedup_seconds: float = 300.0
    lease_group_seconds_max: float = 43_200.0
    """Maximum seconds for which the leases of a lease group can continue without expiring in between."""
    pull_session_seconds: float = 10.0
    """Seconds without a heartbeat after which a pull client loses its queues."""
    parked_pops_max: int = 20_000
    parked_pops_per_group_max: int = 15_000
    quotas: Quotas = DEFAULTS
    first_mode: ConsumeMode = ConsumeMode.POP
    """The consume mode of a new group."""


class Parking:
    """Limits the number of parked pops of each group and of the whole proxy.

    A pop without a wait time never parks, so it is not limited.
    """

    def __init__(self, limit: int, group_limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._group_limit = group_limit

    def raise_if_full(self, taken_by_group: int) -> None:
        """Raise TooManyPops if the group or the proxy has its maximum number of parked pops."""
        if taken_by_group >= self._group_limit:
            raise TooManyPops("the maximum number of pops wait on this group; lower wait_seconds, or use fewer clients")
        if self.taken >= self._limit:
            raise TooManyPops("the maximum number of pops wait on this proxy; lower wait_seconds, or use fewer clients")


class BufferBudget:
    """The memory budget of this proxy for message bodies.

    At most half of the budget is for kept bodies, which stay in memory because a client will read them soon. The queues
    that are being consumed share the rest of the budget evenly. ``full_for``: the lease whose bodies can't all be kept,
    because this half is used up. It is None after a kept body is released. ``cuts``: a count that grows with each call
    that lowers ``share_bytes``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept_bytes = 0
        self._open: set[object] = set()
        self.full_for: LeaseId | None = None
        self.cuts = 0

    def share_bytes(self) -> int:
        return (self._limit_bytes - self._kept_bytes) // max(1, len(self._open))

    @property
    def keepable_bytes(self) -> int:
        return max(0, self._limit_bytes // 2 - self._kept_bytes)

    def keep(self, size: int) -> bool:
        if size > self.keepable_bytes:
            return False
        self._kept_bytes += size
        self.cuts += 1
        return True

    def let_go(self, size: int) -> None:
        self._kept_bytes -= size
        self.full_for = None

    def opened(self, owner: object) -> None:
        self._open.add(owner)
        self.cuts += 1

    def closed(self, owner: object) -> None:
        self._open.discard(owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The ports and the shared objects of one engine."""

    options: EngineOptions
    broker: Broker
    leases: LeaseStore
    dedup: DedupStore
    atomic: AtomicPublisher | None
    """Publishes messages and stores their dedup ids in one transaction. None if the broker and the dedup store are not
    one database."""
    lease_groups: LeaseGroupStore
    assignments: Assignments
    catalog: Catalog
    journal: Journal
    clock: SharedClock
    deadlines: Deadlines
    background: Background
    faults: Faults
    buffer: BufferBudget
    parking: Parking
    router: Router
    missing_queues: set[BrokerQueue]
    """Queues that this proxy should consume, but that were deleted on the broker. Usually empty."""
    mint_copy_id: Callable[[], CopyId]
    next_transient: Callable[[], int]
    mint_lease_id: Callable[[], LeaseId]

    @property
    def instance(self) -> str:
        return self.options.instance


def make_context(
    options: EngineOptions,
    *,
    broker: Broker,
    leases: LeaseStore,
    dedup: DedupStore,
    atomic: AtomicPublisher | None = None,
    lease_groups: LeaseGroupStore,
    assignments: Assignments,
    catalog: Catalog,
    journal: Journal,
    clock: Clock,
    background: Background,
    faults: Faults | None = None,
) -> EngineContext:
    """Create the shared objects, and return a context with these objects and the given ports."""
    lease_numbers, transient_numbers = count(1), count(1)
    shared = SharedClock(clock, catalog.now)
    return EngineContext(
        options=options,
        broker=broker,
        leases=leases,
        dedup=dedup,
        atomic=atomic,
        lease_groups=lease_groups,
        assignments=assignments,
        catalog=catalog,
        journal=journal,
        clock=shared,
        background=background,
        faults=faults or Faults(),
        deadlines=Deadlines(shared),
        buffer=BufferBudget(options.buffer_bytes_max),
        parking=Parking(options.parked_pops_max, options.parked_pops_per_group_max),
        router=Router(background),
        missing_queues=set(),
        mint_copy_id=copy_id_minter(shared.wall),
        next_transient=lambda: next(transient_numbers),
        mint_lease_id=lambda: LeaseId(f"{options.instance}{next(lease_numbers):x}"),
    )
