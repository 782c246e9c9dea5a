"""Routes published messages to queues. One job then stores all messages of a publish, unless they are large.

Each group of a topic has a copy of each message, so that a publish can be much larger than its request. Large publishes
are stored in several jobs (``steps``), so that other jobs can run in between.

A message that is published to a topic is stored in one queue of each group of the topic, or as a delayed message. Its
copy id is new, so it is stored without a check for duplicates. Messages that are published to a queue by its name, or
with ``once``, may be repeated moves of a message. A repeated move has the same copy id, so the queue is checked for
this copy id, and the message is stored only once.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from popgate.adapters.sqlite.channel import StoredQueue
from popgate.adapters.sqlite.delayed import DelayedRow, delayed_row
from popgate.adapters.sqlite.messages import (
    Fields,
    MessageRow,
    insert_messages,
    insert_messages_once,
    message_fields,
    message_key,
)
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, TopicName
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus

STEP_BYTES_MAX = 8 * 1024 * 1024
"""Number of body bytes that one job stores, so that it does not occupy the thread for long. A single message can exceed
it."""

Bindings = dict[TopicName, dict[int, list[StoredQueue]]]


class Part(NamedTuple):
    """Messages that one publish stores in the same queue.

    If ``once`` is True, a message is not stored if the queue already contains its copy id. ``fields`` contains the
    column values of each message.
    """

    queue: StoredQueue
    messages: list[Message]
    fields: list[Fields]
    once: bool

    def between(self, first: int, end: int) -> "Part":
        return self._replace(messages=self.messages[first:end], fields=self.fields[first:end])

    def rows(self, first: int) -> list[MessageRow]:
        """Return the messages as rows with consecutive positions that start at ``first``."""
        queue_id = self.queue.queue_id
        once_in = queue_id if self.once else None
        key = message_key(queue_id, first)
        return [(position, once_in, *fields) for position, fields in enumerate(self.fields, key)]


def route(
    messages: Sequence[Outgoing],
    queues: Mapping[BrokerQueue, StoredQueue],
    bindings: Bindings,
    outcomes: list[PublishOutcome],
    now: float,
) -> tuple[list[Part], list[DelayedRow]]:
    """Return the ``Part`` objects for the queues that receive ``messages``, and the rows of delayed messages.

    A queue can have two parts, one with ``once`` and one without. Delays start at ``now``. If a message can't be
    stored, its outcome replaces the entry at the same index of ``outcomes``.
    """
    delayed: list[DelayedRow] = []
    as_new: dict[StoredQueue, Part] = {}
    with_look: dict[StoredQueue, Part] = {}
    for place, outgoing in enumerate(messages):
        if outgoing.queue is not None:
            named = queues.get(outgoing.queue)
            targets, parts = [] if named is None else [named], with_look
        elif outgoing.topic is not None:
            targets = bindings.get(outgoing.topic, {}).get(outgoing.index, [])
            parts = with_look if outgoing.once else as_new
        else:
            targets, parts = [], as_new
        topic, delay_seconds = outgoing.topic, outgoing.delay_seconds if outgoing.queue is None else 0.0
        if not targets and not delay_seconds:
            outcomes[place] = PublishOutcome(status=PublishStatus.UNROUTED, detail=_unrouted(outgoing))
            continue
        message = outgoing.message
        try:
            fields = message_fields(message)
        except TypeError as error:
            outcomes[place] = PublishOutcome(status=PublishStatus.REFUSED, detail=f"headers: {error}", unfit=True)
            continue
        if delay_seconds and topic is not None:
            delayed.append(delayed_row(now + delay_seconds, topic, outgoing.index, fields))
            continue
        for queue in targets:
            part = parts.get(queue)
            if part is None:
                part = parts[queue] = Part(queue, [], [], parts is with_look)
            part.messages.append(message)
            part.fields.append(fields)
    return [*as_new.values(), *with_look.values()], delayed


def steps(parts: Sequence[Part]) -> list[list[Part]]:
    """Divide ``parts`` into at least one step, each for one job."""
    divided: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        first = 0
        for place, message in enumerate(part.messages):
            size += len(message.body)
            if size > STEP_BYTES_MAX and (place > first or divided[-1]):
                if place > first:
                    divided[-1].append(part.between(first, place))
                divided.append([])
                first, size = place, len(message.body)
        divided[-1].append(part.between(first, len(part.messages)) if first else part)
    return divided


def store(connection: sqlite3.Connection, parts: Sequence[Part], rows: Sequence[list[MessageRow]]) -> list[int]:
    """Store ``rows[i]``, the rows of ``parts[i]``. Return the number of stored rows of each part."""
    counts: list[int] = []
    together: list[MessageRow] = []
    by_queue: dict[int, int] = {}
    for part, part_rows in zip(parts, rows, strict=True):
        if part.once:
            counts.append(insert_messages_once(connection, part.queue.queue_id, part_rows))
        else:
            counts.append(len(part_rows))
            together += part_rows
            by_queue[part.queue.queue_id] = len(part_rows)
    if together:
        insert_messages(connection, together, by_queue)
    return counts


def _unrouted(outgoing: Outgoing) -> str:
    if outgoing.queue is not None:
        return f"queue {outgoing.queue} does not exist"
    return f"topic {outgoing.topic} has no group"
