"""The store's clock: the time in which leases are written.

Wall time is read once, at open, and then advanced by the monotonic clock: a jump of the wall clock neither ends nor
prolongs a lease. Over restarts the time never falls behind the highest saved one. It is saved at most once a second, so
after a crash together with a clock set back, leases may last up to that much longer, never shorter.
"""

from popgate.ports.clock import Clock

SAVE_INTERVAL_SECONDS = 1.0


class StoreClock:
    """Seconds since the Unix epoch that only grow. ``high_water`` is the highest time saved before."""

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
