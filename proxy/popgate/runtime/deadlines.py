"""Calls items when they are due. Items are leases, retries, parked pops, idle buffers and held locks.

One timer serves all items. The design follows beanstalkd: one tick does the work that is due, and returns the seconds
until the next tick.
"""

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from popgate.ports.clock import Clock

NEVER = float("inf")
DUE_BATCH_MAX = 2_000
"""Maximum number of items handled in one tick, so that 100,000 leases that expire together don't block the event loop
for long."""
STALE_MIN = 100
"""The heap is rebuilt only if it contains more stale entries than this."""


class _HasTimer(Protocol):
    timer: float
    """The monotonic time at which the item is due, or NEVER. Only ``DeadlineHeap`` writes it."""


ItemT = TypeVar("ItemT", bound=_HasTimer)


class DeadlineHeap(Generic[ItemT]):
    """Orders items by the time at which each item is due. Pure.

    An item is scheduled for at most one time. If this time is changed or cancelled, the item's former entry stays in
    the heap as a stale entry. If more than half of the entries are stale, the heap is rebuilt without them. So if a
    twelve-hour lease is acked after one second, its entry is not kept for twelve hours.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._stale_count = 0
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap) - self._stale_count

    @property
    def next_at(self) -> float:
        """The time of the first entry, or NEVER if there is none.

        No item is due before it; the first entry may be stale.
        """
        return self._heap[0][0] if self._heap else NEVER

    def schedule(self, at: float, item: ItemT) -> None:
        """Schedule ``item`` for ``at`` (monotonic seconds). This replaces the item's former time, if any."""
        if item.timer == at:
            return
        if item.timer != NEVER:
            self.cancel(item)
        item.timer = at
        heappush(self._heap, (at, next(self._order), item))

    def cancel(self, item: ItemT) -> None:
        """Cancel the scheduled time of ``item``. Does nothing if the item is not scheduled."""
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
        """Remove all items. The ``timer`` of each item is not changed."""
        self._heap.clear()
        self._stale_count = 0


class Timed(_HasTimer, Protocol):
    def due(self, now: float) -> float | None:
        """Do the work that is due at ``now`` (monotonic seconds). Return the time of the next call, or None.

        Must not raise.
        """
        ...


class Deadlines:
    """Calls each item when it is due: never early, and late only if the event loop is busy."""

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
        """Cancel the scheduled call of ``item``. Does nothing if the item is not scheduled."""
        self._items.cancel(item)

    def tick(self) -> float | None:
        """Call the items that are due. Return the seconds until the next tick, or None if no item is scheduled."""
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
        """Remove all items without calling them, and ignore later calls of ``schedule``. Idempotent."""
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
            self._arm()  # also if an item raised an error: one bug must not stop all timers
