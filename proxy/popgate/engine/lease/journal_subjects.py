"""Defines subjects of journal events: messages that this proxy does not hold, and messages that are already settled.

The journal may lack a settlement, because the store's answer to it was lost, or because the proxy that received the
answer died. When a proxy later finds the settled record, it writes the event ``found_settled`` to the journal. If the
settlement was in the journal after all, the second event adds no information.
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
    """The subject of a journal event whose message is not on this proxy, or may leave it before the event is
    written."""

    copy_id: CopyId
    queue_index: int
    delivery_count: int
    leased_at: float
    message: Message | None = None
    client: str | None = None
    invisibility_seconds: float = 0.0


class Found(NamedTuple):
    """A message copy that is settled in the store."""

    subject: Absent
    state: RecordState


def found_so(copy_id: CopyId, queue_index: int, record: LeaseRecord, buffered: BufferedMessage | None) -> Found:
    """Return a settled copy as described by its record and ``buffered``.

    Call this before the record is applied to ``buffered``, because that changes the lease of ``buffered``.
    """
    terms = copy_id, queue_index, record.delivery_count, record.leased_at
    if buffered is None:
        return Found(Absent(*terms), record.state)
    client = buffered.client if buffered.lease_id == record.lease_id else None
    return Found(Absent(*terms, buffered.message, client), record.state)


def note_found_settled(context: EngineContext, subscription: Subscription, many: Sequence[Found]) -> None:
    """Write the event ``found_settled`` with the settled state of each copy to the journal, if there are any copies."""
    if many:
        context.journal.record(
            EventKind.FOUND_SETTLED,
            subscription,
            [one.subject for one in many],
            context.clock.wall(),
            details=[one.state for one in many],
        )
