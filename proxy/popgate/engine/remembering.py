"""What the owner of a queue remembers of its records when the store has lost them (design: section 2).

Owns the translation from what is held to records. Leases stand as they were: their receipt handles are good. What waits
for its retry waits on, but the receipt handle of its last lease is void: it may have been released, and nothing here
tells. What was settled, and the broker has not seen it yet, is settled. Delivery counts go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.names import CopyId, LeaseId
from popgate.engine.held import NO_LEASE, Held, HeldState
from popgate.ports.clock import Clock
from popgate.ports.leases import LoadedRecord

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost


def remembered(host: QueueHost, clock: Clock) -> list[LoadedRecord]:
    """The records of all that ``host`` knows of its queue. What was never handed out has none."""
    now = clock.monotonic()
    found: list[LoadedRecord] = []
    for held in host.held.values():
        move = host.moves.get(held.copy_id)
        if held.state is HeldState.LEASED:
            found.append(_loaded(held, RecordState.LEASED, held.deadline - now))
        elif held.state is HeldState.WAITING:
            found.append(_loaded(held, RecordState.RELEASED, held.deadline - now))
        elif held.state is HeldState.MOVING and move is not None:
            found.append(LoadedRecord(held.copy_id, move, 0.0))
        elif held.delivery_count:
            found.append(_loaded(held, RecordState.RELEASED, 0.0))
    wall = clock.wall()
    for copy_id, count in host.handed_out.items():
        found.append(_bare(copy_id, RecordState.RELEASED, count, wall))
    for copy_id, settled_at in host.evidence.detached.items():
        found.append(_bare(copy_id, RecordState.ACKED, 1, settled_at))
    return found


def _loaded(held: Held, state: RecordState, remaining_seconds: float) -> LoadedRecord:
    record = LeaseRecord(
        state=state,
        lease_id=held.lease_id,
        visible_at=0.0,
        delivery_count=held.delivery_count,
        first_delivered_at=held.first_delivered_at,
        changed_at=0.0,
        epoch=held.epoch,
        leased_at=held.leased_at,
    )
    return LoadedRecord(held.copy_id, record, max(0.0, remaining_seconds))


def _bare(copy_id: CopyId, state: RecordState, count: int, at: float, lease_id: LeaseId = NO_LEASE) -> LoadedRecord:
    return LoadedRecord(copy_id, LeaseRecord(state, lease_id, 0.0, count, at, 0.0, 0, at), 0.0)
