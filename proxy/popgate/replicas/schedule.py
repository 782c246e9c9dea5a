"""Schedules the checks of queues: each queue about once per interval, and different queues at different times."""

import random
from collections.abc import Collection

from popgate.domain.replicas import QueueRef

JITTER = 0.2
SOON_SHARE = 0.05
"""Average delay of an earlier check (``CheckSchedule.soon``), as a share of the interval."""
SOON_SECONDS_MIN = 0.2


class CheckSchedule:
    def __init__(self, interval_seconds: float, chance: random.Random) -> None:
        self._interval = interval_seconds
        self._chance = chance
        self._next: dict[QueueRef, float] = {}

    def know(self, now: float, queues: Collection[QueueRef]) -> None:
        """Set the queues to check. The first checks of new queues are spread over one interval."""
        self._next = {
            queue: self._next[queue] if queue in self._next else now + self._chance.uniform(0.0, self._interval)
            for queue in queues
        }

    def due(self, now: float) -> set[QueueRef]:
        """Return the queues whose check is due at ``now``, and schedule the next check of each of them."""
        due = {queue for queue, at in self._next.items() if at <= now}
        for queue in due:
            self._next[queue] = now + self._interval * self._chance.uniform(1 - JITTER, 1 + JITTER)
        return due

    def soon(self, now: float, queue: QueueRef) -> None:
        """Schedule the next check of ``queue`` soon, unless an earlier check is already scheduled."""
        if queue in self._next:
            pause = max(SOON_SECONDS_MIN, self._interval * SOON_SHARE) * self._chance.uniform(0.5, 1.5)
            self._next[queue] = min(self._next[queue], now + pause)

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until the next check of any queue, or a whole interval if there are no queues."""
        return max(0.0, min(self._next.values(), default=now + self._interval) - now)
