"""Stores delayed messages as rows. Each function runs in the transaction of its caller.

When a message is due by the clock of the store, one transaction copies it into the present queues of its topic and
deletes the delayed row. So no message is lost or stored twice. SQLite copies the bodies itself, so that Python does not
read them.
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
"""Number of body bytes after which one step moves no further message. The last message of a step can exceed this
number. It bounds the time that a step occupies the thread."""

Place = tuple[TopicName, int]
"""A topic, and a queue index. Messages for this index are stored in one queue of each group of the topic."""
DelayedRow = tuple[float, TopicName, int, str, str, str | None, float, float | None, float | None, bytes | None, bytes]
"""The time at which the message is due, its topic, its queue index, and the values of ``FIELD_COLUMNS``."""


class Due(NamedTuple):
    """The ids, places and body sizes of due messages, and the time at which the next message is due.

    The messages are in the order in which they are due. ``following`` is None if no further delayed message exists.
    """

    messages: list[tuple[int, Place, int]]
    following: float | None


class Move(NamedTuple):
    """The delayed messages ``ids``, which are to be stored in one queue at consecutive positions from ``first``."""

    queue_id: int
    first: int
    ids: list[int]


def delayed_row(due_at: float, topic: TopicName, index: int, fields: Fields) -> DelayedRow:
    return (due_at, topic, index, *fields)


def insert_delayed(connection: sqlite3.Connection, rows: Sequence[DelayedRow]) -> None:
    insert_rows(connection, f"INSERT INTO delayed (due_at, topic, queue_index, {FIELD_COLUMNS})", rows)


def count_delayed(connection: sqlite3.Connection) -> tuple[dict[Place, int], float | None]:
    """Return the number of delayed messages of each ``Place``, and the earliest time at which any message is due.

    The time is None if there are no delayed messages. The query reads only an index, but no bodies.
    """
    (earliest,) = connection.execute("SELECT min(due_at) FROM delayed").fetchone()
    sql = "SELECT topic, queue_index, count(*) FROM delayed INDEXED BY delayed_due GROUP BY topic, queue_index"
    return {(topic, index): count for topic, index, count in connection.execute(sql)}, earliest


def find_due(connection: sqlite3.Connection, now: float, *, since: float = 0.0, topic: TopicName | None = None) -> Due:
    """Return the earliest messages that are due between ``since`` and ``now``, up to the limits of one step.

    If ``topic`` is not None, return only messages of this topic.
    """
    found: list[tuple[int, Place, int]] = []
    size = 0
    sql = (
        "SELECT delayed_id, due_at, topic, queue_index, length(body) FROM delayed "
        "WHERE due_at >= ? AND topic = coalesce(?, topic) ORDER BY due_at, topic, queue_index, delayed_id LIMIT ?"
    )
    with closing(connection.execute(sql, (since, topic, DUE_COUNT_MAX + 1))) as cursor:
        for delayed_id, due_at, name, index, body_size in cursor:
            if due_at > now or len(found) == DUE_COUNT_MAX or size >= DUE_BYTES_MAX:
                return Due(found, due_at)
            found.append((delayed_id, (name, index), body_size))
            size += body_size
    return Due(found, None)


def move_due(connection: sqlite3.Connection, moves: Sequence[Move], done: Sequence[int]) -> list[int]:
    """Store the messages of each move in its queue, and delete the delayed messages whose ids are in ``done``.

    Return the number of messages stored by each move.
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
