"""Limits how many refusals a log records, for each caller or address and altogether."""

import threading

DENIALS_PER_SECOND = 5
"""Maximum number of refusals of one caller or address that are recorded in a second."""
DENIALS_PER_SECOND_ALL = 50
"""Maximum number of refusals of all known callers that are recorded in a second, and of all others."""
SOURCES_MAX = 100
"""Maximum number of callers and addresses whose suppressed refusals are counted separately."""
OTHERS = "others"
"""Stands for all sources that are not counted separately."""


class DenialLimiter:
    """Counts refusals in periods, of one second by default. Thread-safe.

    In a period, it admits ``each_max`` refusals of one source, ``all_max`` of all known ones, and as many of others.
    """

    def __init__(
        self,
        each_max: int = DENIALS_PER_SECOND,
        all_max: int = DENIALS_PER_SECOND_ALL,
        period_seconds: float = 1.0,
    ) -> None:
        self._each_max, self._all_max, self._period_seconds = each_max, all_max, period_seconds
        self._lock = threading.Lock()  # held for a few dict operations only
        self._period = float("-inf")
        self._admitted: dict[str, int] = {}
        self._admitted_all = {True: 0, False: 0}
        self._suppressed: dict[str, int] = {}

    def admits(self, source: str, now: float, *, is_known: bool) -> bool:
        """Return whether to record a refusal of ``source`` at the monotonic time ``now``. ``is_known``: the source is a
        principal, whose refusals strangers must not keep out of the log."""
        with self._lock:
            if now - self._period >= self._period_seconds:
                self._period = now
                self._admitted.clear()
                self._admitted_all = {True: 0, False: 0}
            count = self._admitted.get(source, 0)
            if count < self._each_max and self._admitted_all[is_known] < self._all_max:
                self._admitted[source] = count + 1  # not more entries than refusals are admitted altogether
                self._admitted_all[is_known] += 1
                return True
            if source not in self._suppressed and len(self._suppressed) >= SOURCES_MAX:
                source = OTHERS
            self._suppressed[source] = self._suppressed.get(source, 0) + 1
            return False

    def take_suppressed(self) -> list[tuple[str, int]]:
        """Return the sources of which refusals were suppressed, with their numbers, and forget them."""
        with self._lock:
            found, self._suppressed = self._suppressed, {}
        return [*found.items()]
