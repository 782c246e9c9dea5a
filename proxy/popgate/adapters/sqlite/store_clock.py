"""Provides the store's clock, in whose time lease records are written.

Wall time is read once, at open, and then advanced by the monotonic clock. So a jump of the wall clock neither ends nor
prolongs a lease. After a restart, the time is never below the highest saved time. The time is saved at most once a
second. So if a crash and a clock set back occur together, leases may last up to that much longer, but never shorter.
"""

from popgate.ports.clock import Clock

SAVE_INTERVAL_SECONDS = 1.0


class StoreClock:
    """A clock of Unix seconds that only increase. ``high_water`` is the highest time that was saved before."""

    def __init__(self, clock: Clock, high_water: float) -> None:
        self._clock = clock
        self._offset = max(clock.wall(), high_water) - clock.monotonic()
        self._saved = high_water

    def now(self) -> float:
        return self._clock.monotonic() + self._offset

    def save_due(self, now: float) -> bool:
        """Return whether the next transaction should save ``now``."""
        return now - self._saved >= SAVE_INTERVAL_SECONDS

    def saved(self, now: float) -> None:
        """Record that ``now`` is on stable storage."""
        self._saved = now
