"""Measures the ages of conditions, as far as this keeper has observed them."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class AgeBook(Generic[T]):
    """Tracks how long each condition has held.

    Ages restart at 0 if more than ``gap_seconds_max`` pass between two observations.
    """

    def __init__(self, gap_seconds_max: float) -> None:
        self._gap = gap_seconds_max
        self._since: dict[T, float] = {}
        self._looked_at = 0.0

    def note(self, now: float, are_so: Collection[T]) -> dict[T, float]:
        """Return the ages, in seconds, of the conditions ``are_so``, which hold now. All others have ended."""
        if now - self._looked_at > self._gap:
            self._since.clear()
        self._looked_at = now
        self._since = {one: self._since.get(one, now) for one in are_so}
        return {one: now - since for one, since in self._since.items()}
