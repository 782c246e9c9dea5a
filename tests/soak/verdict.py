"""Decides whether the samples of a soak are flat, by a slope that single outliers don't change.

The slope is that of Theil and Sen: the median of the slopes between all pairs of samples. A series grows if its slope,
over the whole time, adds up to more than its bound: a share of its median, but at least an amount below which growth
says nothing. The first part of the time is left out: caches fill, and records are kept for minutes.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

WARM_UP_SHARE = 0.25
PAIRS_SAMPLES_MAX = 400
"""Maximum number of samples of a series that are compared pair by pair; of a longer one, every n-th."""


class Bound(NamedTuple):
    """Most growth over the whole time: this share of the median, or this amount if it is larger."""

    share: float
    amount: float


class Finding(NamedTuple):
    """What a series did: its median, by how much it grew or shrank over the time, and how much it may grow."""

    name: str
    median: float
    growth: float
    growth_max: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.growth_max


BOUNDS: Mapping[str, Bound] = {
    "memory_bytes": Bound(0.10, 16 << 20),
    "descriptors": Bound(0.10, 10),
    "threads": Bound(0.0, 3),
    "publish_p50_seconds": Bound(0.50, 0.010),
    "publish_p99_seconds": Bound(0.50, 0.100),
    "pop_p50_seconds": Bound(0.50, 0.010),
    "pop_p99_seconds": Bound(0.50, 0.100),
    "ack_p50_seconds": Bound(0.50, 0.010),
    "ack_p99_seconds": Bound(0.50, 0.100),
}


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope of points (time, value), or 0 if there are fewer than two."""
    step = -(-len(points) // PAIRS_SAMPLES_MAX) or 1
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points[::step], 2) if x2 != x1]
    return median(slopes) if slopes else 0.0


def judged(samples: Sequence[Mapping[str, float]]) -> list[Finding]:
    """Judge every series of the samples that has a bound. Each sample has its time as `at`, in seconds."""
    warm = [one for one in samples if one["at"] >= samples[-1]["at"] * WARM_UP_SHARE] if samples else []
    findings: list[Finding] = []
    for name, bound in BOUNDS.items():
        points = [(one["at"], one[name]) for one in warm if name in one]
        if not points:
            continue
        middle = median(value for _, value in points)
        growth = slope_of(points) * (points[-1][0] - points[0][0])
        findings.append(Finding(name, middle, growth, max(bound.share * middle, bound.amount)))
    return findings
