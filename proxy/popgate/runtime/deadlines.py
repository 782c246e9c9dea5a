"""Calls items at their deadlines: leases, retries, parked pops, idle buffers and held locks.

One loop handles all of them. The design follows beanstalkd: one tick does the due work and returns the time to the next
tick.
"""

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from popgate.ports.clock import Clock

NEVER = float("inf")
DUE_BATCH_MAX = 2_000
"""Maximum number of items handled in one tick, so that 100,000 leases that end together don't block the event loop for
long."""
STALE_MIN = 100
"""Number of stale entries up to which the heap is not rebuilt."""


class _HasTimer(Protocol):
    timer: float
    """The time at which the item is due, or NEVER. Only ``DeadlineHeap`` writes it."""


ItemT = TypeVar("ItemT", bound=_HasTimer)


class DeadlineHeap(Generic[ItemT]):
    """Orders items by the time at which each is due. Pure.

    An item has one time. If its time changes or is cancelled, its former entry stays in the heap and is stale. If there
    are more stale entries than others, the heap is rebuilt. So if a twelve-hour lease is acked after a second, its
    entry does not stay for twelve hours.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._stale_count = 0
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap) - self._stale_count

    @property
    def next_at(self) -> float:
        """The time of the next check: the time of the first item, or an earlier one. NEVER if there is no entry."""
        return self._heap[0][0] if self._heap else NEVER

    def schedule(self, at: float, item: ItemT) -> None:
        """Make ``item`` due at ``at`` (monotonic seconds). This replaces its former time."""
        if item.timer == at:
            return
        self.cancel(item)
        item.timer = at
        heappush(self._heap, (at, next(self._order), item))

    def cancel(self, item: ItemT) -> None:
        """Remove the time of ``item``. Does nothing if it has none."""
        if item.timer == NEVER:
            return
        item.timer = NEVER
        self._stale_count += 1
        if self._stale_count > STALE_MIN and self._stale_count * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].timer]
            heapify(self._heap)
            self._stale_count = 0

    def pop_due(self, now: float) -> ItemT | None:
        """Remove and return the first item that is due, or return None if no item is due."""
        while self._heap and self._heap[0][0] <= now:
            at, _, item = heappop(self._heap)
            if item.timer == at:
                item.timer = NEVER
                return item
            self._stale_count -= 1
        return None

    def clear(self) -> None:
        """Forget all items. Their ``timer`` is not changed."""
        self._heap.clear()
        self._stale_count = 0


class Timed(_HasTimer, Protocol):
    def due(self, now: float) -> float | None:
        """Do the work due at ``now`` (monotonic), and return the time of the next call, or None. Must not raise."""
        ...


class Deadlines:
    """Calls items when they are due: never early, and late only by the event loop's lag."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: DeadlineHeap[Timed] = DeadlineHeap()
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = NEVER
        self._stopped = False

    def __len__(self) -> int:
        return len(self._items)

    def schedule(self, at: float, item: Timed) -> None:
        """Call ``item.due`` at ``at`` (monotonic seconds). This replaces the item's former time."""
        if self._stopped:
            return
        self._items.schedule(at, item)
        if at < self._armed_for:
            self._arm()

    def cancel(self, item: Timed) -> None:
        """Don't call ``item``. Does nothing if it has no time."""
        self._items.cancel(item)

    def tick(self) -> float | None:
        """Call the items that are due. Return the seconds until the next item, or None if there is none."""
        now = self._clock.monotonic()
        for _ in range(DUE_BATCH_MAX):
            item = self._items.pop_due(now)
            if item is None:
                break
            again = item.due(now)
            if again is not None:
                self.schedule(again, item)
        next_at = self._items.next_at
        return None if next_at == NEVER else max(0.0, next_at - now)

    def stop(self) -> None:
        """Forget all items, and ignore new ones. Idempotent."""
        self._stopped = True
        if self._handle is not None:
            self._handle.cancel()
        self._items.clear()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_for = self._items.next_at
        if self._armed_for < NEVER:
            delay = max(0.0, self._armed_for - self._clock.monotonic())
            self._handle = asyncio.get_running_loop().call_later(delay, self._run)

    def _run(self) -> None:
        self._handle = None
        try:
            self.tick()
        finally:
            self._arm()  # even if an item raised: one bug must not stop all leases
