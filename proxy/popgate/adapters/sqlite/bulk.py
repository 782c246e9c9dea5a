"""Many rows in one statement.

``executemany`` makes a step of each row, and gives up and takes back the interpreter's lock around each step: beside a
busy event loop every row then waits for its turn. A statement of many rows is one step, which runs beside the loop.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

ROWS_MAX = 256


def insert_rows(connection: sqlite3.Connection, insert: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Run ``insert`` (up to, and without, its VALUES) for all ``rows``. Returns how many rows were changed."""
    count = 0
    for part in _parts(rows):
        sql = _with_values(insert, len(part), len(part[0]))
        count += connection.execute(sql, tuple(chain.from_iterable(part))).rowcount
    return count


def _parts(rows: Sequence[tuple[object, ...]]) -> Iterator[Sequence[tuple[object, ...]]]:
    """Sizes are powers of two: few statements to prepare and to cache."""
    start = 0
    while left := len(rows) - start:
        size = min(ROWS_MAX, 1 << left.bit_length() - 1)
        yield rows[start : start + size]
        start += size


@cache
def _with_values(insert: str, rows: int, columns: int) -> str:
    row = f"({','.join('?' * columns)})"
    return f"{insert} VALUES {','.join([row] * rows)}"
