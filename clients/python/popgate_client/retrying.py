"""When to try again. Owns back-off and the end of patience; does not sleep, and does not know what is being tried."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

BACKOFF_INITIAL_SECONDS = 0.05
BACKOFF_SECONDS_MAX = 5.0
BACKOFF_MULTIPLIER = 2.0


@dataclass(slots=True)
class Backoff:
    """Pauses that grow to a maximum, jittered so that clients don't come back in step."""

    chance: random.Random
    _step: float = BACKOFF_INITIAL_SECONDS

    def next_seconds(self, at_least_seconds: float = 0.0, *, lease_seconds: float = math.inf) -> float:
        """The next pause: never below what the server asked for, and else short enough that what must happen before a
        lease of this length ends gets several tries."""
        step = min(self._step, BACKOFF_SECONDS_MAX, lease_seconds / 6)
        self._step = step * BACKOFF_MULTIPLIER
        return at_least_seconds + step * self.chance.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Something succeeded: the next failure starts small again."""
        self._step = BACKOFF_INITIAL_SECONDS


class Patience:
    """Says how long to pause before the next try, until trying has gone on for `seconds_max`.

    The time runs from the first failure, not from the call, so that a long poll that breaks at its end still has all
    of it. 0 means no second try.
    """

    def __init__(self, *, seconds_max: float, clock: Callable[[], float], chance: random.Random) -> None:
        self._seconds_max = seconds_max
        self._clock = clock
        self._backoff = Backoff(chance)
        self._failing_since: float | None = None

    def pause_seconds(self, at_least_seconds: float = 0.0) -> float | None:
        """The pause before the next try, or None when it would end too late."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        pause = self._backoff.next_seconds(at_least_seconds)
        return pause if now + pause <= self._failing_since + self._seconds_max else None
