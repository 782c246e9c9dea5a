"""Inserts many rows with one statement.

``executemany`` executes the statement once for each row, and releases and reacquires Python's global interpreter lock
around each execution. While the event loop is busy, each row then waits for this lock. A statement with many rows is
executed once, in parallel with the event loop.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

ROWS_MAX = 256

T = TypeVar("T")


def insert_rows(connection: sqlite3.Connection, insert: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Run the statement ``insert``, which must end before VALUES, for all ``rows``.

    Return the number of inserted rows.
    """
    count = 0
    for part in parts(rows):
        sql = f"{insert} {_values(len(part), len(part[0]))}"
        count += connection.execute(sql, tuple(chain.from_iterable(part))).rowcount
    return count


def insert_selected(
    connection: sqlite3.Connection, insert: str, common: tuple[object, ...], rows: Sequence[tuple[object, ...]]
) -> int:
    """Insert ``rows`` like ``insert_rows``, but pass the values that all rows share only once, to save time.

    ``insert`` is an ``INSERT ... SELECT`` that must end before FROM. In its SELECT, ?1, ?2, ... are the values of
    ``common``, and column1, column2, ... are the values of each row.
    """
    count = 0
    for part in parts(rows):
        sql = f"{insert} FROM ({_values(len(part), len(part[0]), first=len(common) + 1)})"
        count += connection.execute(sql, (*common, *chain.from_iterable(part))).rowcount
    return count


def parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield ``rows`` in order, in slices of at most ``ROWS_MAX`` rows.

    The length of each slice is a power of two, to limit the number of different SQL statements.
    """
    start = 0
    while left := len(rows) - start:
        size = min(ROWS_MAX, 1 << left.bit_length() - 1)
        yield rows[start : start + size]
        start += size


def parameters(count: int) -> str:
    """Return ``count`` SQL placeholders, separated by commas."""
    return ",".join("?" * count)


@cache
def _values(rows: int, columns: int, first: int = 1) -> str:
    places = [f"?{number}" for number in range(first, first + rows * columns)]
    return "VALUES " + ",".join(f"({','.join(places[at : at + columns])})" for at in range(0, len(places), columns))
