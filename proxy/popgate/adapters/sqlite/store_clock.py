"""Provides the clock of the embedded store. All times in lease records are times of this clock.

The wall clock is read once, when the store is opened. From then on, the monotonic clock advances the time. So a jump of
the wall clock neither ends nor extends a lease. After a restart, the time starts at the saved time or later. The time
is saved at most once per second. If popgate crashes and the wall clock is set back before the restart, the time between
the last save and the restart may not count for leases. These leases then last longer than granted, but no lease ends
early.
"""

from popgate.ports.clock import Clock

SAVE_INTERVAL_SECONDS = 1.0


class StoreClock:
    """A clock in Unix seconds that never goes back. ``high_water`` is the latest time that was saved before."""

    def __init__(self, clock: Clock, high_water: float) -> None:
        self._clock = clock
        self._offset = max(clock.wall(), high_water) - clock.monotonic()
        self._saved = high_water

    def now(self) -> float:
        return self._clock.monotonic() + self._offset

    def save_due(self, now: float) -> bool:
        """Return whether the next transaction should save the time ``now``."""
        return now - self._saved >= SAVE_INTERVAL_SECONDS

    def saved(self, now: float) -> None:
        """Record that the time ``now`` has been written to stable storage."""
        self._saved = now
