"""Stores the embedded broker's queues as rows, and deletes the messages of deleted queues."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from popgate.adapters.sqlite.messages import POSITION_MIN, message_key, position_of
from popgate.domain.names import BrokerQueue, TopicName

PURGE_COUNT_MAX = 1024
PURGE_BYTES_MAX = 64 * 1024 * 1024


class QueueRow(NamedTuple):
    """A row of ``broker_queue``, and the position of the next message in this queue.

    ``topic`` and ``queue_index`` are None if no topic publishes to the queue. ``stored`` is the number of stored
    messages.
    """

    queue_id: int
    name: BrokerQueue
    topic: TopicName | None
    queue_index: int | None
    stored: int
    next_position: int


def load_queues(connection: sqlite3.Connection) -> list[QueueRow]:
    """Return all queues. The ``next_position`` of each queue is the position after its last message."""
    rows = connection.execute("SELECT queue_id, name, topic, queue_index, stored FROM broker_queue").fetchall()
    return [_queue_row(connection, *row) for row in rows]


def declare_queue(connection: sqlite3.Connection, name: BrokerQueue, topic: TopicName | None, index: int) -> QueueRow:
    """Create the queue if it does not exist, and bind it to ``topic``.

    If ``topic`` is None, the queue receives only messages that are published to its name.
    """
    connection.execute(
        "INSERT INTO broker_queue (name, topic, queue_index) VALUES (?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET topic = excluded.topic, queue_index = excluded.queue_index",
        (name, topic, None if topic is None else index),
    )
    row = connection.execute(
        "SELECT queue_id, name, topic, queue_index, stored FROM broker_queue WHERE name = ?", (name,)
    ).fetchone()
    return _queue_row(connection, *row)


def unbind_topic(connection: sqlite3.Connection, topic: TopicName) -> None:
    connection.execute("UPDATE broker_queue SET topic = NULL, queue_index = NULL WHERE topic = ?", (topic,))


def delete_queues(connection: sqlite3.Connection, queue_ids: Sequence[int]) -> None:
    """Delete the queues, and mark their messages as garbage for ``purge_garbage``."""
    rows = [(queue_id,) for queue_id in queue_ids]
    connection.executemany("DELETE FROM broker_queue WHERE queue_id = ?", rows)
    connection.executemany("INSERT OR IGNORE INTO broker_garbage (queue_id) VALUES (?)", rows)


def purge_garbage(connection: sqlite3.Connection) -> bool:
    """Delete a limited number of messages of one deleted queue. Return whether garbage may remain.

    The limits ``PURGE_COUNT_MAX`` and ``PURGE_BYTES_MAX`` prevent a long delay of other jobs.
    """
    garbage = connection.execute("SELECT queue_id FROM broker_garbage LIMIT 1").fetchone()
    if garbage is None:
        return False
    (queue_id,) = garbage
    start, end = message_key(queue_id, 0), message_key(queue_id + 1, 0)
    size = 0
    last: int | None = None
    sql = (
        "SELECT message_key, length(body) FROM message WHERE message_key >= ? AND message_key < ? "
        "ORDER BY message_key LIMIT ?"
    )
    with closing(connection.execute(sql, (start, end, PURGE_COUNT_MAX))) as cursor:
        for key, body_size in cursor:
            last = key
            size += body_size
            if size >= PURGE_BYTES_MAX:
                break
    if last is not None:
        connection.execute("DELETE FROM message WHERE message_key >= ? AND message_key <= ?", (start, last))
    else:
        connection.execute("DELETE FROM broker_garbage WHERE queue_id = ?", (queue_id,))
    return True


def _queue_row(
    connection: sqlite3.Connection,
    queue_id: int,
    name: BrokerQueue,
    topic: TopicName | None,
    queue_index: int | None,
    stored: int,
) -> QueueRow:
    (last,) = connection.execute(
        "SELECT max(message_key) FROM message WHERE message_key >= ? AND message_key < ?",
        (message_key(queue_id, 0), message_key(queue_id + 1, 0)),
    ).fetchone()
    next_position = POSITION_MIN if last is None else position_of(last) + 1
    return QueueRow(queue_id, name, topic, queue_index, stored, next_position)
