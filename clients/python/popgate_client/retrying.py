"""Decides when to try again and when to give up. Does not sleep, and does not know what is tried."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

BACKOFF_INITIAL_SECONDS = 0.05
BACKOFF_SECONDS_MAX = 5.0
BACKOFF_MULTIPLIER = 2.0


@dataclass(slots=True)
class Backoff:
    """Computes pauses that grow to a maximum, with jitter so that clients don't retry in step."""

    chance: random.Random
    _step: float = BACKOFF_INITIAL_SECONDS

    def next_seconds(self, at_least_seconds: float = 0.0, *, lease_seconds: float = math.inf) -> float:
        """Return the next pause: at least `at_least_seconds`, plus a step that is short enough for several tries before
        a lease of `lease_seconds` ends."""
        step = min(self._step, BACKOFF_SECONDS_MAX, lease_seconds / 6)
        self._step = step * BACKOFF_MULTIPLIER
        return at_least_seconds + step * self.chance.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start with the smallest pause again, after a success."""
        self._step = BACKOFF_INITIAL_SECONDS


class Patience:
    """Computes the pause before each next try, until the tries have taken `seconds_max`.

    The time runs from the first failure, not from the call, so that a long poll that fails at its end still has the
    full time. 0 means no second try.
    """

    def __init__(self, *, seconds_max: float, clock: Callable[[], float], chance: random.Random) -> None:
        self._seconds_max = seconds_max
        self._clock = clock
        self._backoff = Backoff(chance)
        self._failing_since: float | None = None

    def pause_seconds(self, at_least_seconds: float = 0.0) -> float | None:
        """Return the pause before the next try, or None if it would end too late."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        pause = self._backoff.next_seconds(at_least_seconds)
        return pause if now + pause <= self._failing_since + self._seconds_max else None
