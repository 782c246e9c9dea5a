"""Frees the memory of deleted queues, which the garbage collector finds too late.

A proxy lets the collector run rarely, because it scans all messages (``bootstrap``). Almost everything is freed without
it. But the objects of a queue refer to each other. So a deleted queue stays in memory until the collector scans the
generation that its objects have reached, which can take hours. A program that creates and deletes many topics would
fill the memory. Therefore the collector scans everything after many deletions.
"""

import gc
import logging
from collections.abc import Callable
from time import monotonic, perf_counter

_log = logging.getLogger(__name__)

QUEUES_MIN = 500
"""Number of deleted queues that may wait for the collector. They take about 8 MB."""
MESSAGES_PER_QUEUE = 200
"""For each of this many messages in memory, one more deleted queue may wait: a scan takes longer with more messages."""
SECONDS_MIN = 10.0
"""Minimum seconds between two scans."""


class DeletedQueues:
    """Counts the queues that this proxy has dropped since the last scan, and starts the scans."""

    def __init__(self, collect: Callable[[], object] = gc.collect, clock: Callable[[], float] = monotonic) -> None:
        self._collect = collect
        self._clock = clock
        self._count = 0
        self._not_before = 0.0

    def add(self, count: int, messages_in_memory: Callable[[], int]) -> None:
        """Note ``count`` dropped queues, and scan if it is time for it."""
        self._count += count
        if self._count < QUEUES_MIN or self._clock() < self._not_before:
            return
        if self._count < QUEUES_MIN + messages_in_memory() // MESSAGES_PER_QUEUE:
            return
        began = perf_counter()
        self._collect()
        _log.debug(
            "freed the memory of deleted queues",
            extra={"count": self._count, "seconds": round(perf_counter() - began, 3)},
        )
        self._count = 0
        self._not_before = self._clock() + SECONDS_MIN
