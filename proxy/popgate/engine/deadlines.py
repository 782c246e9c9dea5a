"""One deadline loop for every timer of the engine: leases, retries, parked pops, idle buffers.

Owns a heap of (when, item). Knows nothing of what is due: an item's ``due`` does the work and may name its next time.
After beanstalkd: one tick does the due work and returns the time to the next.
"""

import asyncio
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from popgate.ports.clock import Clock

DUE_BATCH_MAX = 2_000
"""Items of one tick, so that 100,000 leases that end together don't hold the event loop for long."""


class Timed(Protocol):
    def due(self, now: float) -> float | None:
        """Do what is due at ``now`` (monotonic); return when to be called again, or None. Must not raise."""
        ...


class Deadlines:
    """Calls items when their time has come; never early, late by the event loop's lag."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timed]] = []
        self._order = count()
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, at: float, item: Timed) -> None:
        """Call ``item.due`` at ``at`` (monotonic seconds). An item that no longer cares ignores the call."""
        heappush(self._heap, (at, next(self._order), item))
        if at < self._armed_for:
            self._arm()

    def tick(self) -> float | None:
        """Do what is due; return the seconds until the next item, or None where nothing waits."""
        now = self._clock.monotonic()
        heap = self._heap
        for _ in range(DUE_BATCH_MAX):
            if not heap or heap[0][0] > now:
                break
            _, _, item = heappop(heap)
            again = item.due(now)
            if again is not None:
                heappush(heap, (again, next(self._order), item))
        return max(0.0, heap[0][0] - now) if heap else None

    def stop(self) -> None:
        """Forget all items. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        self._heap.clear()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_for = float("inf")
        if self._heap:
            self._armed_for = self._heap[0][0]
            delay = max(0.0, self._armed_for - self._clock.monotonic())
            self._handle = asyncio.get_running_loop().call_later(delay, self._run)

    def _run(self) -> None:
        self._handle = None
        self.tick()
        self._arm()
