"""Defines subjects of journal events: messages that are not here, and messages that are found to be settled.

If the store's answer to a settlement was lost, or the proxy that received it died, the journal may lack the settlement.
The proxy that finds the record later journals ``found_settled``. If the settlement was journaled after all, the second
event adds no information.
"""

from collections.abc import Sequence
from typing import NamedTuple

from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.message import Message
from popgate.domain.names import CopyId, Subscription
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import BufferedMessage
from popgate.ports.journal import EventKind


class Absent(NamedTuple):
    """The subject of an event whose message is not on this proxy, or will not be when the event is journaled."""

    copy_id: CopyId
    queue_index: int
    delivery_count: int
    leased_at: float
    message: Message | None = None
    client: str | None = None
    invisibility_seconds: float = 0.0


class Found(NamedTuple):
    """A copy that is settled in the store."""

    subject: Absent
    state: RecordState


def found_so(copy_id: CopyId, queue_index: int, record: LeaseRecord, buffered: BufferedMessage | None) -> Found:
    """Describe a settled copy by its record and ``buffered``. Call it before the record is applied to ``buffered``."""
    terms = copy_id, queue_index, record.delivery_count, record.leased_at
    if buffered is None:
        return Found(Absent(*terms), record.state)
    client = buffered.client if buffered.lease_id == record.lease_id else None
    return Found(Absent(*terms, buffered.message, client), record.state)


def note_found_settled(context: EngineContext, subscription: Subscription, many: Sequence[Found]) -> None:
    """Journal the copies that were found to be settled, with the state of each. Does nothing if there are none."""
    if many:
        context.journal.record(
            EventKind.FOUND_SETTLED,
            subscription,
            [one.subject for one in many],
            context.clock.wall(),
            details=[one.state for one in many],
        )
