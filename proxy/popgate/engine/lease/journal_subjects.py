"""Subjects of journal events whose messages are not here, and those that turn out to be settled.

Where the store's answer to a settlement was lost, or the proxy that got it died, nobody may have journaled it. Whoever
comes upon the record later says so: ``found_settled`` may follow the event that it repeats, and then tells nothing new.
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
    """The subject of an event whose message is not on this proxy, or will not be when the event is told."""

    copy_id: CopyId
    queue_index: int
    delivery_count: int
    leased_at: float
    message: Message | None = None
    client: str | None = None
    invisibility_seconds: float = 0.0


class Found(NamedTuple):
    """A copy that the store has as settled."""

    subject: Absent
    state: RecordState


def found_so(copy_id: CopyId, queue_index: int, record: LeaseRecord, held: BufferedMessage | None) -> Found:
    """As its record says, with what is known of it here: ask before ``held`` is made to conform."""
    terms = copy_id, queue_index, record.delivery_count, record.leased_at
    if held is None:
        return Found(Absent(*terms), record.state)
    client = held.client if held.lease_id == record.lease_id else None
    return Found(Absent(*terms, held.message, client), record.state)


def note_found_settled(context: EngineContext, subscription: Subscription, many: Sequence[Found]) -> None:
    """Journal what was found to be settled, with what became of each. Costs nothing where nothing was."""
    if many:
        context.journal.record(
            EventKind.FOUND_SETTLED,
            subscription,
            [one.subject for one in many],
            context.clock.wall(),
            details=[one.state for one in many],
        )
