"""What can be seen of a journal that is written to files, for /metrics."""

from typing import NamedTuple


class JournalFigures(NamedTuple):
    """``written_events`` are in the ``file_count`` finished files, of ``file_bytes`` together. ``dropped_events`` are
    lost for good. ``lag_seconds``: how old the oldest event is that is in no finished file; 0.0 where all are."""

    written_events: int
    dropped_events: int
    buffered_events: int
    file_count: int
    file_bytes: int
    failed_writes: int
    lag_seconds: float
