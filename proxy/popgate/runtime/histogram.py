"""Counts durations in a fixed number of buckets, as a histogram of Prometheus does.

An observation costs one search among the bounds and two additions, so it may be made for each batch on the hot path.
"""

from bisect import bisect_left
from collections.abc import Sequence

WAIT_SECONDS = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0, 86_400.0)
"""Upper bounds of the buckets for times that messages wait or are leased, in seconds."""
ROUND_TRIP_SECONDS = (0.000_5, 0.002, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the buckets for round trips and for delays of the event loop, in seconds."""


class Histogram:
    """Counts durations by the first of ``bounds`` (in seconds, ascending) that is not less than the duration.

    ``counts`` has one more element than ``bounds``, for longer durations. ``total_seconds`` is the sum of all of them.
    """

    __slots__ = ("bounds", "counts", "total_seconds")

    def __init__(self, bounds: Sequence[float] = ROUND_TRIP_SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """Count a duration ``weight`` times. A negative one, from a clock that was set, counts as 0."""
        self.counts[bisect_left(self.bounds, seconds)] += weight
        if seconds > 0.0:
            self.total_seconds += seconds * weight

    def with_other(self, other: "Histogram") -> "Histogram":
        """Return a histogram that has counted the durations of both. ``other`` must have the same bounds."""
        both = Histogram(self.bounds)
        both.counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        both.total_seconds = self.total_seconds + other.total_seconds
        return both

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets in the form of Prometheus: each upper bound as text, with the number of durations up to
        it."""
        buckets: list[tuple[str, float]] = []
        count = 0
        for bound, more in zip([*self.bounds, None], self.counts, strict=True):
            count += more
            buckets.append(("+Inf" if bound is None else str(bound), count))
        return buckets
