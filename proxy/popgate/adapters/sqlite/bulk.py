"""Many rows in one statement.

``executemany`` makes a step of each row, and gives up and takes back the interpreter's lock around each step: beside a
busy event loop every row then waits for its turn. A statement of many rows is one step, which runs beside the loop.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

ROWS_MAX = 256

T = TypeVar("T")


def insert_rows(connection: sqlite3.Connection, insert: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Run ``insert`` (up to, and without, its VALUES) for all ``rows``. Returns how many rows were changed."""
    count = 0
    for part in parts(rows):
        sql = _with_values(insert, len(part), len(part[0]))
        count += connection.execute(sql, tuple(chain.from_iterable(part))).rowcount
    return count


def parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """``rows`` in order, cut. Sizes are powers of two: few statements to prepare and to cache."""
    start = 0
    while left := len(rows) - start:
        size = min(ROWS_MAX, 1 << left.bit_length() - 1)
        yield rows[start : start + size]
        start += size


def parameters(count: int) -> str:
    """So many places in a statement."""
    return ",".join("?" * count)


@cache
def _with_values(insert: str, rows: int, columns: int) -> str:
    row = f"({parameters(columns)})"
    return f"{insert} VALUES {','.join([row] * rows)}"
