"""Rebuilds the lease records of a queue from its owner's memory, after the store has lost them (decision 7).

Leases are unchanged, and their receipt handles stay valid. A delayed message stays delayed, but the receipt handle of
its last lease becomes void, because the owner does not know whether that lease was released. A settled message that the
owner has not acked at the broker yet stays settled. Delivery counts are preserved.
"""

from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.names import CopyId, LeaseId
from popgate.engine.queue.buffered import NO_LEASE, BufferedMessage, MessageState
from popgate.engine.queue.state import QueueState
from popgate.ports.leases import LoadedRecord


def recovered_records(state: QueueState, *, now: float, wall: float) -> list[LoadedRecord]:
    """Return the records of all messages of a queue. A message that was never handed out has no record."""
    found: list[LoadedRecord] = []
    for message in state.messages.values():
        move = state.moves.get(message.copy_id)
        if message.state is MessageState.LEASED:
            found.append(_loaded(message, RecordState.LEASED, message.deadline - now))
        elif message.state is MessageState.DELAYED:
            found.append(_loaded(message, RecordState.RELEASED, message.deadline - now))
        elif message.state is MessageState.MOVING and move is not None:
            found.append(LoadedRecord(message.copy_id, move, 0.0))
        elif message.delivery_count:
            found.append(_loaded(message, RecordState.RELEASED, 0.0))
    for copy_id, count in state.deliveries.remembered.items():
        found.append(_bare(copy_id, RecordState.RELEASED, count, wall))
    for copy_id, settled_at in state.evidence.detached.items():
        found.append(_bare(copy_id, RecordState.ACKED, 1, settled_at))
    return found


def _loaded(message: BufferedMessage, state: RecordState, remaining_seconds: float) -> LoadedRecord:
    record = LeaseRecord(
        state=state,
        lease_id=message.lease_id,
        visible_at=0.0,
        delivery_count=message.delivery_count,
        first_delivered_at=message.first_delivered_at,
        changed_at=0.0,
        epoch=message.epoch,
        leased_at=message.leased_at,
    )
    return LoadedRecord(message.copy_id, record, max(0.0, remaining_seconds))


def _bare(copy_id: CopyId, state: RecordState, count: int, at: float, lease_id: LeaseId = NO_LEASE) -> LoadedRecord:
    return LoadedRecord(copy_id, LeaseRecord(state, lease_id, 0.0, count, at, 0.0, 0, at), 0.0)
