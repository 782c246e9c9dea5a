"""Stores messages of the embedded broker as rows, in the caller's transaction.

The key of a message is one integer, made of the queue's number and the message's position. So a queue's messages are
adjacent, in publish order, and a fetch reads one range of the table.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import orjson

from popgate.domain.message import Message

POSITION_BITS = 40
"""Number of bits of a position. This allows 10^12 messages in a queue, and 8 million queues in the lifetime of a
file."""
POSITION_MIN = 1
FETCH_BYTES_MAX = 8 * 1024 * 1024
"""Number of bytes after which a fetch ends: the message that exceeds them is its last. Bounds the thread's time and
memory."""
FETCH_COUNT_MAX = 1024
MESSAGE_OVERHEAD_BYTES = 256

FIELD_COLUMNS = "copy_id, message_id, ordering_key, published_at, visible_at, expires_at, headers, body"
"""The columns of ``Fields``, in the same order."""

_COLUMNS = f"message_key, {FIELD_COLUMNS}"
_INSERT = f"INSERT INTO message (message_key, once_in, {FIELD_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

Fields = tuple[str, str, str | None, float, float | None, float | None, bytes | None, bytes]
MessageRow = tuple[int, int | None, str, str, str | None, float, float | None, float | None, bytes | None, bytes]


class Fetched(NamedTuple):
    """Messages with their positions, in order.

    ``cut``: the fetch ended at one of its limits, so there may be more messages.
    """

    messages: list[tuple[int, Message]]
    cut: bool


def message_key(queue_id: int, position: int) -> int:
    return queue_id << POSITION_BITS | position


def position_of(key: int) -> int:
    return key & (1 << POSITION_BITS) - 1


def message_fields(message: Message) -> Fields:
    """Return ``message`` as columns. Raises: TypeError if its headers can't be stored."""
    headers = orjson.dumps(dict(message.headers)) if message.headers else None
    copy_id, message_id, body, _, ordering_key, published_at, visible_at, expires_at = message
    return copy_id, message_id, ordering_key, published_at, visible_at, expires_at, headers, body


def insert_messages(connection: sqlite3.Connection, rows: Sequence[MessageRow], counts: Mapping[int, int]) -> None:
    """Store ``rows``. ``counts`` is the number of rows for each queue."""
    connection.executemany(_INSERT, rows)
    count_stored(connection, counts)


def insert_messages_once(connection: sqlite3.Connection, queue_id: int, rows: Sequence[MessageRow]) -> int:
    """Store the ``rows`` whose copy is not yet in the queue. Return how many were stored."""
    # INSERT OR IGNORE would also ignore a clash of positions, and so lose a message.
    sql = f"{_INSERT} ON CONFLICT (once_in, copy_id) WHERE once_in IS NOT NULL DO NOTHING"
    count = connection.executemany(sql, rows).rowcount
    count_stored(connection, {queue_id: count})
    return count


def fetch_after(connection: sqlite3.Connection, queue_id: int, position: int, count_max: int) -> Fetched:
    """Return the messages of a queue from ``position`` on."""
    return _fetch(
        connection,
        f"SELECT {_COLUMNS} FROM message WHERE message_key >= ? AND message_key < ? ORDER BY message_key LIMIT ?",
        (message_key(queue_id, position), message_key(queue_id + 1, 0), count_max),
        count_max,
    )


def fetch_positions(connection: sqlite3.Connection, queue_id: int, positions: Sequence[int]) -> Fetched:
    """Return the messages at these positions that still exist."""
    return _fetch(
        connection,
        f"SELECT {_COLUMNS} FROM message WHERE message_key IN (SELECT value FROM json_each(?)) ORDER BY message_key",
        (_keys(queue_id, positions),),
        len(positions),
    )


def delete_messages(connection: sqlite3.Connection, queue_id: int, positions: Sequence[int]) -> int:
    """Delete the messages at these positions. Return how many existed."""
    if not positions:
        return 0
    sql = "DELETE FROM message WHERE message_key IN (SELECT value FROM json_each(?))"
    count = connection.execute(sql, (_keys(queue_id, positions),)).rowcount
    count_stored(connection, {queue_id: -count})
    return count


def _keys(queue_id: int, positions: Sequence[int]) -> str:
    """Return the keys of these positions for json_each."""
    return orjson.dumps([message_key(queue_id, position) for position in positions]).decode()


def count_stored(connection: sqlite3.Connection, counts: Mapping[int, int]) -> None:
    """Add to the ``stored`` count of each queue.

    Counting a million rows instead would read through all their bodies.
    """
    connection.executemany(
        "UPDATE broker_queue SET stored = stored + ? WHERE queue_id = ?",
        [(count, queue_id) for queue_id, count in counts.items()],
    )


def _fetch(connection: sqlite3.Connection, sql: str, parameters: tuple[object, ...], count_max: int) -> Fetched:
    messages: list[tuple[int, Message]] = []
    size = 0
    # Close the cursor even if the fetch ends early: an open statement would prevent SQLite from folding the log into
    # the file.
    with closing(connection.execute(sql, parameters)) as cursor:
        for key, copy_id, message_id, ordering_key, published_at, visible_at, expires_at, headers, body in cursor:
            message = Message(
                copy_id=copy_id,
                message_id=message_id,
                body=body,
                headers={} if headers is None else orjson.loads(headers),
                ordering_key=ordering_key,
                published_at=published_at,
                visible_at=visible_at,
                expires_at=expires_at,
            )
            messages.append((position_of(key), message))
            size += len(body) + MESSAGE_OVERHEAD_BYTES
            if size >= FETCH_BYTES_MAX:
                return Fetched(messages, cut=True)
    return Fetched(messages, cut=len(messages) == count_max)
