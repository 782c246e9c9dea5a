"""Stores delayed publishes as rows, in the caller's transaction.

A row waits until it is due by the store's clock. One transaction then moves it into the queues of the groups that
exist, and deletes it, so that no message is lost or doubled. Bodies are copied within SQLite.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import orjson

from popgate.adapters.sqlite.bulk import insert_rows
from popgate.adapters.sqlite.messages import FIELD_COLUMNS, Fields, count_stored, message_key
from popgate.domain.names import TopicName

DUE_COUNT_MAX = 1024
DUE_BYTES_MAX = 8 * 1024 * 1024
"""Number of bytes after which a step ends: the message that exceeds them is its last. Bounds the thread's time."""

Place = tuple[TopicName, int]
"""A topic, and the index of its queues."""
DelayedRow = tuple[float, TopicName, int, str, str, str | None, float, float | None, float | None, bytes | None, bytes]
"""due_at, topic, index, and the fields of the message."""


class Due(NamedTuple):
    """Due messages in order, and the time at which the next message after them is due (None: there is none)."""

    messages: list[tuple[int, Place]]
    following: float | None


class Move(NamedTuple):
    """Delayed messages, by their ids, that are stored in one queue, starting at position ``first``."""

    queue_id: int
    first: int
    ids: list[int]


def delayed_row(due_at: float, topic: TopicName, index: int, fields: Fields) -> DelayedRow:
    return (due_at, topic, index, *fields)


def insert_delayed(connection: sqlite3.Connection, rows: Sequence[DelayedRow]) -> None:
    insert_rows(connection, f"INSERT INTO delayed (due_at, topic, queue_index, {FIELD_COLUMNS})", rows)


def count_delayed(connection: sqlite3.Connection) -> tuple[dict[Place, int], float | None]:
    """Return how many messages wait for each place, and when the first one is due.

    Reads only an index, and no bodies.
    """
    (earliest,) = connection.execute("SELECT min(due_at) FROM delayed").fetchone()
    sql = "SELECT topic, queue_index, count(*) FROM delayed INDEXED BY delayed_due GROUP BY topic, queue_index"
    return {(topic, index): count for topic, index, count in connection.execute(sql)}, earliest


def find_due(connection: sqlite3.Connection, now: float) -> Due:
    """Return the messages of the next step that are due at ``now``, the earliest first."""
    found: list[tuple[int, Place]] = []
    size = 0
    sql = (
        "SELECT delayed_id, due_at, topic, queue_index, length(body) FROM delayed "
        "ORDER BY due_at, topic, queue_index, delayed_id LIMIT ?"
    )
    with closing(connection.execute(sql, (DUE_COUNT_MAX + 1,))) as cursor:
        for delayed_id, due_at, topic, index, body_size in cursor:
            if due_at > now or len(found) == DUE_COUNT_MAX or size >= DUE_BYTES_MAX:
                return Due(found, due_at)
            found.append((delayed_id, (topic, index)))
            size += body_size
    return Due(found, None)


def move_due(connection: sqlite3.Connection, moves: Sequence[Move], done: Sequence[int]) -> list[int]:
    """Store the messages of each move, and delete the delayed messages ``done``.

    Return how many messages each queue received.
    """
    sql = (
        f"INSERT INTO message (message_key, {FIELD_COLUMNS}) SELECT ? + place.key, {FIELD_COLUMNS} "
        "FROM json_each(?) AS place CROSS JOIN delayed ON delayed_id = place.value"
    )
    counts: list[int] = []
    for queue_id, first, ids in moves:
        key = message_key(queue_id, first)
        count = connection.execute(sql, (key, orjson.dumps(ids).decode())).rowcount
        count_stored(connection, {queue_id: count})
        counts.append(count)
    gone = orjson.dumps(done).decode()
    connection.execute("DELETE FROM delayed WHERE delayed_id IN (SELECT value FROM json_each(?))", (gone,))
    return counts
