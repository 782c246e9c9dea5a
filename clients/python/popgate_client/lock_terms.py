"""For how long a client may believe that it holds a lock, and when it renews it. Pure; told the time.

    trusted --renewed--> trusted ...     trusted --the server says so--> lost
                                         trusted --ttl since the last good renewal was sent--> lost, whatever it says

The time of a lock runs at the server from when it had the request, so from when the request was sent is never too
late. A lock that is lost stays lost: an answer that comes after the end does not bring it back.
"""

import random
import time

from popgate_client.errors import LockLost, LockNotFound, PopgateError, RetryLater
from popgate_client.retrying import Backoff

RENEWALS_PER_TERM = 3
ANSWER_SECONDS_MIN = 1.0
MOMENT_SECONDS = 0.001
"""The shortest time for which httpx can wait."""


def term_clock() -> float:
    """Seconds that pass also while the machine is suspended, where the system has such a clock (Linux): the server's
    pass, too."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class LockTerm:
    """Of one lock that was asked for at `asked_at`."""

    def __init__(self, name: str, ttl_seconds: float, asked_at: float, chance: random.Random) -> None:
        self._name = name
        self._ttl_seconds = ttl_seconds
        self._chance = chance
        self._backoff = Backoff(chance)
        self._failure: PopgateError | None = None
        self._lost: LockLost | None = None
        self.restart(asked_at)

    def restart(self, asked_at: float) -> None:
        """It is held, as the server said to what was asked then."""
        self.ends_at = asked_at + self._ttl_seconds
        self.renew_at = asked_at + self._ttl_seconds / RENEWALS_PER_TERM * self._chance.uniform(0.9, 1.0)

    def lost(self, now: float) -> LockLost | None:
        """Why it is not held any longer; None while it is."""
        if self._lost is None and now >= self.ends_at:
            why = f": {self._failure.detail}" if self._failure else ""
            detail = f"lock {self._name} was not renewed within {self._ttl_seconds:g} s{why}"
            self._lost = LockLost("lock_lost", detail)
        return self._lost

    def renewed(self, asked_at: float, now: float) -> None:
        """The server renewed what was asked at `asked_at`, and said so now."""
        if self.lost(now) is None:
            self._failure = None
            self._backoff.reset()
            self.restart(asked_at)

    def failed(self, error: PopgateError, now: float) -> None:
        """The server was asked, in vain. Only its word that the lock is gone ends it; all else is asked again."""
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
        """It was given back: whoever still asks is told that it is not held."""
        self._lost = self._lost or LockLost("lock_lost", f"lock {self._name} was released")

    def left_seconds(self, now: float) -> float:
        """Until it ends; more than none."""
        return max(MOMENT_SECONDS, self.ends_at - now)

    def rest_seconds(self, now: float) -> float:
        """How long there is nothing to do."""
        return max(0.0, min(self.renew_at, self.ends_at) - now)

    def answer_seconds(self, now: float) -> float:
        """How long to wait for the answer to a renewal: a second one may still come in time."""
        within = max(ANSWER_SECONDS_MIN, self._ttl_seconds / RENEWALS_PER_TERM)
        return min(within, self.left_seconds(now))
