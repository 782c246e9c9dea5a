"""Converts rows of values to columns of Arrow: the snapshot of each message at its event.

The event loop waits while the interpreter iterates over values, so this module iterates as little as possible. If a
column has a value in each row, or in none, it is passed on as one text or one block of numbers.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.arrow import Array, compute, pyarrow
from popgate.adapters.journal_parquet.rows import WIDTH

TEXT, COUNT, SECONDS = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
_FORMATS = {COUNT: "i", SECONDS: "d"}
_SEPARATOR = "\0"
"""Separates joined texts. No id should contain it; if one does, the conversion is only slower."""


class RowColumns(NamedTuple):
    """The values of rows, in the order of ``rows``."""

    copy_id: Array
    queue: Array
    delivery_count: Array
    """0 if the message was never delivered."""
    leased_at: Array
    """0.0 if it is not known. This also applies to the seconds below."""
    client: Array
    invisibility_seconds: Array
    message_id: Array
    ordering_key: Array
    published_at: Array
    visible_at: Array
    """None if the message was visible at once."""
    size_bytes: Array


_TYPES = RowColumns(TEXT, COUNT, COUNT, SECONDS, TEXT, SECONDS, TEXT, TEXT, SECONDS, SECONDS, COUNT)
assert len(_TYPES) == WIDTH, "rows has as many values"


def row_columns(runs: Sequence[tuple[list[Any], int, int]]) -> tuple[RowColumns, list[int]]:
    """Return the rows of ``runs``, each row once, and the number of each run's first row.

    A run is a list of values, the index of its first row in the list, and its number of rows.

    Raises: pyarrow's errors if a value has another type or can't be written.
    """
    parts: list[tuple[list[Any], int, int]] = []
    first_rows: list[int] = []
    known: dict[tuple[int, int], int] = {}
    shared: list[Any] = []
    first = end = row_count = 0
    for values, first_value, count in runs:
        row = known.setdefault((id(values), first_value), row_count)
        first_rows.append(row)
        if row < row_count:
            continue
        row_count += count
        if values is not shared or first_value != end:
            parts.append((shared, first, end))
            shared, first = values, first_value
        end = first_value + WIDTH * count
    parts.append((shared, first, end))
    return RowColumns._make(_array(_column(parts, place), kind) for place, kind in enumerate(_TYPES)), first_rows


def _column(parts: Sequence[tuple[list[Any], int, int]], place: int) -> list[Any]:
    column: list[Any] = []
    for values, first, end in parts:
        column += values[first + place : end : WIDTH]
    return column


def _array(column: list[Any], kind: Any) -> Array:
    if column[0] is None and column.count(None) == len(column):
        return pyarrow.nulls(len(column), kind)
    try:
        return _joined(column) if kind is TEXT else _packed(column, kind)
    except (TypeError, struct.error):
        return pyarrow.array(column, kind)


def _joined(column: list[str]) -> Array:
    """Convert texts by joining them. Raises: TypeError if one of them is None."""
    array = compute.split_pattern(pyarrow.array([_SEPARATOR.join(column)], TEXT), _SEPARATOR).values
    return array if len(array) == len(column) else pyarrow.array(column, TEXT)


def _packed(column: list[float], kind: Any) -> Array:
    """Convert numbers by packing them. Raises: struct.error if one of them is None or does not fit."""
    numbers = struct.pack(f"={len(column)}{_FORMATS[kind]}", *column)
    return pyarrow.Array.from_buffers(kind, len(column), [None, pyarrow.py_buffer(numbers)])
