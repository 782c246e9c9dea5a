"""Measures how long this keeper has observed conditions, for example that a queue has too few replicas."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class AgeBook(Generic[T]):
    """Tracks how long each condition has been true.

    If more than ``gap_seconds_max`` pass between two calls of ``note``, all ages restart at 0.
    """

    def __init__(self, gap_seconds_max: float) -> None:
        self._gap = gap_seconds_max
        self._since: dict[T, float] = {}
        self._looked_at = 0.0

    def note(self, now: float, are_so: Collection[T]) -> dict[T, float]:
        """Record that exactly the conditions ``are_so`` are true at ``now``. Return their ages in seconds."""
        if now - self._looked_at > self._gap:
            self._since.clear()
        self._looked_at = now
        self._since = {one: self._since.get(one, now) for one in are_so}
        return {one: now - since for one, since in self._since.items()}
