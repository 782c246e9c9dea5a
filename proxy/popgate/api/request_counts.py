"""Counts the answered requests of a proxy, for /metrics."""

from collections.abc import Callable


class RequestCounts:
    """Counts answered requests by operation and status. ``connections`` returns the number of client connections."""

    __slots__ = ("connections", "counts")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}
        self.connections: Callable[[], int] = lambda: 0

    def count(self, operation: str, status: int) -> None:
        """Count an answer."""
        key = (operation, status)
        self.counts[key] = self.counts.get(key, 0) + 1
