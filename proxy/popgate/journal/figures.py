"""Defines the figures of a journal that is written to files, for /metrics."""

from typing import NamedTuple


class JournalFigures(NamedTuple):
    """The state of a journal.

    ``written_events`` are in ``file_count`` finished files, which have ``file_bytes`` in total. ``dropped_events`` are
    lost permanently. ``lag_seconds`` is the age of the oldest event that is not in a finished file, or 0.0 if there is
    none.
    """

    written_events: int
    dropped_events: int
    buffered_events: int
    file_count: int
    file_bytes: int
    failed_writes: int
    lag_seconds: float
