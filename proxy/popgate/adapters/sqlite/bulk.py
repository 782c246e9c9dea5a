"""Inserts many rows with one statement.

``executemany`` runs a step for each row, and releases and reacquires the interpreter's lock around each step. Beside a
busy event loop, every row then waits for the lock. A statement of many rows is one step, which runs in parallel with
the event loop.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

ROWS_MAX = 256

T = TypeVar("T")


def insert_rows(connection: sqlite3.Connection, insert: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Run ``insert`` (without its VALUES) for all ``rows``. Return how many rows were changed."""
    count = 0
    for part in parts(rows):
        sql = f"{insert} {_values(len(part), len(part[0]))}"
        count += connection.execute(sql, tuple(chain.from_iterable(part))).rowcount
    return count


def insert_selected(
    connection: sqlite3.Connection, insert: str, common: tuple[object, ...], rows: Sequence[tuple[object, ...]]
) -> int:
    """Insert like ``insert_rows``, but pass the values that all rows have in common only once, to save time.

    ``insert`` ends before its FROM. It selects ?1, ?2, ... from ``common`` and column1, column2, ... from each row.
    """
    count = 0
    for part in parts(rows):
        sql = f"{insert} FROM ({_values(len(part), len(part[0]), first=len(common) + 1)})"
        count += connection.execute(sql, (*common, *chain.from_iterable(part))).rowcount
    return count


def parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield ``rows`` in order, in parts.

    The sizes of the parts are powers of two, to limit the number of different statements.
    """
    start = 0
    while left := len(rows) - start:
        size = min(ROWS_MAX, 1 << left.bit_length() - 1)
        yield rows[start : start + size]
        start += size


def parameters(count: int) -> str:
    """Return ``count`` placeholders for a statement."""
    return ",".join("?" * count)


@cache
def _values(rows: int, columns: int, first: int = 1) -> str:
    places = [f"?{number}" for number in range(first, first + rows * columns)]
    return "VALUES " + ",".join(f"({','.join(places[at : at + columns])})" for at in range(0, len(places), columns))
