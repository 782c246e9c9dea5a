"""Stores the messages of the embedded broker as rows. Each function runs in the transaction of its caller.

The key of a message is an integer that combines the id of the queue and the position of the message. So the messages of
a queue are adjacent in the table, in publish order, and a fetch reads one range of the table.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import orjson

from popgate.domain.message import Message

POSITION_BITS = 40
"""Number of bits of a position. This allows 10^12 messages in each queue, and 8 million queues during the lifetime of a
file."""
POSITION_MIN = 1
FETCH_BYTES_MAX = 8 * 1024 * 1024
"""Number of bytes after which a fetch returns no further message. The last message of a fetch can exceed this number.
It bounds the time that a fetch occupies the thread, and its memory."""
FETCH_COUNT_MAX = 1024
MESSAGE_OVERHEAD_BYTES = 256

FIELD_COLUMNS = "copy_id, message_id, ordering_key, published_at, visible_at, expires_at, headers, body"
"""The columns of ``Fields``, in the same order."""

_COLUMNS = f"message_key, {FIELD_COLUMNS}"
_INSERT = f"INSERT INTO message (message_key, once_in, {FIELD_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

Fields = tuple[str, str, str | None, float, float | None, float | None, bytes | None, bytes]
MessageRow = tuple[int, int | None, str, str, str | None, float, float | None, float | None, bytes | None, bytes]


class Fetched(NamedTuple):
    """The messages of one fetch with their positions, ordered by position.

    If ``cut`` is True, the fetch ended at one of its limits, so more messages may exist.
    """

    messages: list[tuple[int, Message]]
    cut: bool


def message_key(queue_id: int, position: int) -> int:
    return queue_id << POSITION_BITS | position


def position_of(key: int) -> int:
    return key & (1 << POSITION_BITS) - 1


def message_fields(message: Message) -> Fields:
    """Return the values of ``FIELD_COLUMNS`` for ``message``. Raises: TypeError if its headers can't be stored."""
    headers = orjson.dumps(dict(message.headers)) if message.headers else None
    copy_id, message_id, body, _, ordering_key, published_at, visible_at, expires_at = message
    return copy_id, message_id, ordering_key, published_at, visible_at, expires_at, headers, body


def insert_messages(connection: sqlite3.Connection, rows: Sequence[MessageRow], counts: Mapping[int, int]) -> None:
    """Store ``rows``. ``counts`` is the number of rows of each queue, by queue id."""
    connection.executemany(_INSERT, rows)
    count_stored(connection, counts)


def insert_messages_once(connection: sqlite3.Connection, queue_id: int, rows: Sequence[MessageRow]) -> int:
    """Store those ``rows`` whose copy is not in the queue yet. Return the number of stored rows."""
    # INSERT OR IGNORE would also ignore a second message with the same position, and so lose this message.
    sql = f"{_INSERT} ON CONFLICT (once_in, copy_id) WHERE once_in IS NOT NULL DO NOTHING"
    count = connection.executemany(sql, rows).rowcount
    count_stored(connection, {queue_id: count})
    return count


def fetch_after(connection: sqlite3.Connection, queue_id: int, position: int, count_max: int) -> Fetched:
    """Return at most ``count_max`` messages of a queue whose position is at least ``position``, in order."""
    return _fetch(
        connection,
        f"SELECT {_COLUMNS} FROM message WHERE message_key >= ? AND message_key < ? ORDER BY message_key LIMIT ?",
        (message_key(queue_id, position), message_key(queue_id + 1, 0), count_max),
        count_max,
    )


def fetch_positions(connection: sqlite3.Connection, queue_id: int, positions: Sequence[int]) -> Fetched:
    """Return the messages at ``positions`` that still exist, ordered by position."""
    return _fetch(
        connection,
        f"SELECT {_COLUMNS} FROM message WHERE message_key IN (SELECT value FROM json_each(?)) ORDER BY message_key",
        (_keys(queue_id, positions),),
        len(positions),
    )


def oldest_message_at(connection: sqlite3.Connection, queue_id: int) -> float | None:
    """Return when the first message of a queue became visible. Return None if there is none, or its time is unknown."""
    row = connection.execute(
        "SELECT coalesce(visible_at, published_at) FROM message WHERE message_key >= ? AND message_key < ?"
        " ORDER BY message_key LIMIT 1",
        (message_key(queue_id, 0), message_key(queue_id + 1, 0)),
    ).fetchone()
    return None if row is None or not row[0] else float(row[0])


def delete_messages(connection: sqlite3.Connection, queue_id: int, positions: Sequence[int]) -> int:
    """Delete the messages at ``positions``. Return the number of deleted messages."""
    if not positions:
        return 0
    sql = "DELETE FROM message WHERE message_key IN (SELECT value FROM json_each(?))"
    count = connection.execute(sql, (_keys(queue_id, positions),)).rowcount
    count_stored(connection, {queue_id: -count})
    return count


def _keys(queue_id: int, positions: Sequence[int]) -> str:
    """Return the message keys of ``positions`` as a JSON array, for SQLite's ``json_each``."""
    return orjson.dumps([message_key(queue_id, position) for position in positions]).decode()


def count_stored(connection: sqlite3.Connection, counts: Mapping[int, int]) -> None:
    """Add ``counts`` (by queue id, negative after a deletion) to the stored number of messages of each queue.

    The number is stored, because SQLite would have to read through all message bodies to count the rows.
    """
    connection.executemany(
        "UPDATE broker_queue SET stored = stored + ? WHERE queue_id = ?",
        [(count, queue_id) for queue_id, count in counts.items()],
    )


def _fetch(connection: sqlite3.Connection, sql: str, parameters: tuple[object, ...], count_max: int) -> Fetched:
    messages: list[tuple[int, Message]] = []
    size = 0
    # Close the cursor even if the fetch ends early. An open statement would prevent SQLite from moving the content of
    # the write-ahead log into the file.
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
