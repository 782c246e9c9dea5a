"""Converts rows (``rows``), which are snapshots of messages at their events, to Arrow columns.

While Python code on the writer's thread iterates over values, the event loop must wait. So this module iterates over as
few values as possible. If every row has a value in a column, the column is passed to Arrow as one joined text or one
block of numbers. If no row has a value, Arrow creates the column.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.arrow import Array, compute, pyarrow
from popgate.adapters.journal_parquet.rows import WIDTH

TEXT, COUNT, SECONDS = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
_FORMATS = {COUNT: "i", SECONDS: "d"}
_SEPARATOR = "\0"
"""Separates joined texts. If a text contains this character, the conversion is slower, but still correct."""


class RowColumns(NamedTuple):
    """One Arrow column for each value of a row, in the order of the values in ``rows``."""

    copy_id: Array
    queue: Array
    delivery_count: Array
    """0 if the message was never delivered."""
    leased_at: Array
    """Unix seconds, or 0.0 if unknown. In ``invisibility_seconds`` and ``published_at``, 0.0 also means unknown."""
    client: Array
    invisibility_seconds: Array
    message_id: Array
    ordering_key: Array
    published_at: Array
    visible_at: Array
    """Null if the message was visible as soon as it was published."""
    size_bytes: Array


_TYPES = RowColumns(TEXT, COUNT, COUNT, SECONDS, TEXT, SECONDS, TEXT, TEXT, SECONDS, SECONDS, COUNT)
assert len(_TYPES) == WIDTH, "rows has as many values"


def row_columns(runs: Sequence[tuple[list[Any], int, int]]) -> tuple[RowColumns, list[int]]:
    """Return the columns of the rows of ``runs``, and for each run the number of its first row in the columns.

    A run consists of a list of values, the index of the run's first value in the list, and the number of rows. If
    several runs start at the same value of the same list, their rows are converted only once.

    Raises: the errors of pyarrow if a value has a wrong type or can't be written.
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
    """Convert texts to an Arrow array by joining and splitting them. Raises: TypeError if a text is None."""
    array = compute.split_pattern(pyarrow.array([_SEPARATOR.join(column)], TEXT), _SEPARATOR).values
    return array if len(array) == len(column) else pyarrow.array(column, TEXT)


def _packed(column: list[float], kind: Any) -> Array:
    """Convert numbers to an Arrow array by packing them. Raises: struct.error if a number is None or does not fit."""
    numbers = struct.pack(f"={len(column)}{_FORMATS[kind]}", *column)
    return pyarrow.Array.from_buffers(kind, len(column), [None, pyarrow.py_buffer(numbers)])
