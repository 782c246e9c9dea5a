"""Defines the numbers that /metrics shows about a journal that is written to files."""

from typing import NamedTuple


class JournalFigures(NamedTuple):
    """Numbers that describe the state of a journal.

    ``written_events`` events are in ``file_count`` finished files with a total size of ``file_bytes``.
    ``dropped_events`` events are lost permanently. ``buffered_events`` events are not in a finished file yet.
    ``lag_seconds`` is the age of the oldest of these, or 0.0 if there are none. ``failed_writes`` is the number of
    failed attempts to write a file.
    """

    written_events: int
    dropped_events: int
    buffered_events: int
    file_count: int
    file_bytes: int
    failed_writes: int
    lag_seconds: float
