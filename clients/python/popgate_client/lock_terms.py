"""Decides how long a client may trust that it holds a lock, and when it renews it. Pure: the time is passed in.

    trusted --renewed--> trusted ...     trusted --the server says so--> lost
                                         trusted --ttl after the last successful renewal was sent--> lost in any case

At the server a lock's time runs from when the request arrived, so a term that is measured from when the request was
sent never ends too late. A lost lock stays lost: an answer that comes after its end does not restore it.
"""

import random
import time

from popgate_client.errors import LockLost, LockNotFound, PopgateError, RetryLater
from popgate_client.retrying import Backoff

RENEWALS_PER_TERM = 3
ANSWER_SECONDS_MIN = 1.0
MOMENT_SECONDS = 0.001
"""Shortest timeout in seconds that httpx can use."""


def term_clock() -> float:
    """Return seconds of a clock that also runs while the machine is suspended, as the server's clock does, if the
    system has one (Linux)."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class LockTerm:
    """The term of one lock that was requested at `asked_at`."""

    def __init__(self, name: str, ttl_seconds: float, asked_at: float, chance: random.Random) -> None:
        self._name = name
        self._ttl_seconds = ttl_seconds
        self._chance = chance
        self._backoff = Backoff(chance)
        self._failure: PopgateError | None = None
        self._lost: LockLost | None = None
        self.restart(asked_at)

    def restart(self, asked_at: float) -> None:
        """Begin the term again: the server granted a request that was sent at `asked_at`."""
        self.ends_at = asked_at + self._ttl_seconds
        self.renew_at = asked_at + self._ttl_seconds / RENEWALS_PER_TERM * self._chance.uniform(0.9, 1.0)

    def lost(self, now: float) -> LockLost | None:
        """Return why the lock is no longer held; None while it is held."""
        if self._lost is None and now >= self.ends_at:
            why = f": {self._failure.detail}" if self._failure else ""
            detail = f"lock {self._name} was not renewed within {self._ttl_seconds:g} s{why}"
            self._lost = LockLost("lock_lost", detail)
        return self._lost

    def renewed(self, asked_at: float, now: float) -> None:
        """Record a renewal that was requested at `asked_at` and answered now."""
        if self.lost(now) is None:
            self._failure = None
            self._backoff.reset()
            self.restart(asked_at)

    def failed(self, error: PopgateError, now: float) -> None:
        """Record a failed request. Only the server's answer that the lock is lost ends the term; after any other error
        the renewal is repeated."""
        if self.lost(now) is not None:
            return
        self._failure = error
        if isinstance(error, LockLost | LockNotFound):
            self._lost = LockLost("lock_lost", error.detail, error.status)
        else:
            asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
            at_least = min(asked_for, self._ttl_seconds / 6)
            self.renew_at = now + self._backoff.next_seconds(at_least, lease_seconds=self._ttl_seconds)

    def close(self) -> None:
        """Record the release: from now on the lock counts as not held."""
        self._lost = self._lost or LockLost("lock_lost", f"lock {self._name} was released")

    def left_seconds(self, now: float) -> float:
        """Return the time until the term ends; always more than 0."""
        return max(MOMENT_SECONDS, self.ends_at - now)

    def rest_seconds(self, now: float) -> float:
        """Return the time until the next renewal or the end."""
        return max(0.0, min(self.renew_at, self.ends_at) - now)

    def answer_seconds(self, now: float) -> float:
        """Return how long to wait for the answer to a renewal, so that a second one may still succeed in time."""
        within = max(ANSWER_SECONDS_MIN, self._ttl_seconds / RENEWALS_PER_TERM)
        return min(within, self.left_seconds(now))
