"""One deadline loop for all timers of a part: leases, retries, parked pops, idle buffers, locks that are held.

Owns a heap of (when, item). Knows nothing of what is due: an item's ``due`` does the work and may name its next time.
After beanstalkd: one tick does the due work and returns the time to the next.

An item has one time. Where it gets another one, or is cancelled, its former entry stays in the heap and means nothing;
once such entries outnumber the others the heap is made anew, so that a lease of twelve hours which is acked after a
second does not stay behind for twelve hours.
"""

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from popgate.ports.clock import Clock

NEVER = float("inf")
DUE_BATCH_MAX = 2_000
"""Items of one tick, so that 100,000 leases that end together don't hold the event loop for long."""
STALE_MIN = 1_000
"""Fewer entries than that are not worth a new heap."""


class Timed(Protocol):
    timer: float
    """When it will be called, or NEVER. Only ``Deadlines`` writes it."""

    def due(self, now: float) -> float | None:
        """Do what is due at ``now`` (monotonic); return when to be called again, or None. Must not raise."""
        ...


class Deadlines:
    """Calls items when their time has come; never early, late by the event loop's lag."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timed]] = []
        self._stale_count = 0
        self._order = count()
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = NEVER
        self._stopped = False

    def __len__(self) -> int:
        return len(self._heap) - self._stale_count

    def schedule(self, at: float, item: Timed) -> None:
        """Call ``item.due`` at ``at`` (monotonic seconds), and no more at the time that it had before."""
        if self._stopped or item.timer == at:
            return
        self.cancel(item)
        item.timer = at
        heappush(self._heap, (at, next(self._order), item))
        if at < self._armed_for:
            self._arm()

    def cancel(self, item: Timed) -> None:
        """Don't call ``item``. Does nothing where it has no time."""
        if item.timer == NEVER:
            return
        item.timer = NEVER
        self._stale_count += 1
        if self._stale_count > STALE_MIN and self._stale_count * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].timer]
            heapify(self._heap)
            self._stale_count = 0

    def tick(self) -> float | None:
        """Do what is due; return the seconds until the next item, or None where nothing waits."""
        now = self._clock.monotonic()
        for _ in range(DUE_BATCH_MAX):
            if not self._heap or self._heap[0][0] > now:
                break
            at, _, item = heappop(self._heap)
            if item.timer != at:
                self._stale_count -= 1
                continue
            item.timer = NEVER
            again = item.due(now)
            if again is not None:
                self.schedule(again, item)
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def stop(self) -> None:
        """Forget all items, and those that come yet. Idempotent."""
        self._stopped = True
        if self._handle is not None:
            self._handle.cancel()
        self._heap.clear()
        self._stale_count = 0

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_for = NEVER
        if self._heap:
            self._armed_for = self._heap[0][0]
            delay = max(0.0, self._armed_for - self._clock.monotonic())
            self._handle = asyncio.get_running_loop().call_later(delay, self._run)

    def _run(self) -> None:
        self._handle = None
        try:
            self.tick()
        finally:
            self._arm()  # also after an item that broke its promise: one bug must not stop all leases
