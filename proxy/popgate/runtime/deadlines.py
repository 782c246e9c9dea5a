"""Calls items when they are due. Items are leases, retries, parked pops, idle buffers and held locks.

One timer serves all items. The design follows beanstalkd: one tick does the work that is due, and returns the seconds
until the next tick.
"""

import asyncio
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
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

    An item is scheduled for at most one time. If this time is changed or cancelled, the item's former entry stays as a
    stale entry. If more than half of the entries are stale, the heap is rebuilt without them. So if a twelve-hour lease
    is acked after one second, its entry is not kept for twelve hours.

    Messages that are leased together have the same deadline. The heap contains each time only once, so such a message
    needs eight bytes. Items with the same time are due in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self._heap: list[float] = []
        """The times for which items are scheduled, except ``_due_at``."""
        self._items: dict[float, ItemT | list[ItemT]] = {}
        """The items of each time in ``_heap``, including stale ones. A single item is stored without a list."""
        self._due: list[ItemT] = []
        """The items that ``pop_due`` returns next, the last one first. Their time is ``_due_at``."""
        self._due_at = NEVER
        self._shared: list[ItemT] = []
        self._shared_at = NEVER
        """``_shared`` is the list that ``_items`` contains for this time, or NEVER: the latest list that has grown."""
        self._entry_count = 0
        self._stale_count = 0
        self.next_at = NEVER
        """The time of the first entry, or NEVER if there is none. No item is due before it; the first entry may be
        stale."""

    def __len__(self) -> int:
        return self._entry_count - self._stale_count

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over the scheduled items, in no particular order. Visits the stale entries, too."""
        yield from (item for item in self._due if item.timer == self._due_at)
        for at, items in self._items.items():
            for item in items if isinstance(items, list) else (items,):
                if item.timer == at:
                    yield item

    def schedule(self, at: float, item: ItemT) -> None:
        """Schedule ``item`` for ``at`` (monotonic seconds). This replaces the item's former time, if any."""
        timer = item.timer
        if timer == at:
            return
        if timer != NEVER:
            self.cancel(item)
        item.timer = at
        self._entry_count += 1
        if at == self._shared_at:
            self._shared.append(item)
            return
        others = self._items.get(at)
        if others is None:
            self._items[at] = item
            heappush(self._heap, at)
            if at < self.next_at:
                self.next_at = at
            return
        if not isinstance(others, list):
            others = self._items[at] = [others]
        others.append(item)
        self._shared_at, self._shared = at, others

    def cancel(self, item: ItemT) -> None:
        """Cancel the scheduled time of ``item``. Does nothing if the item is not scheduled."""
        if item.timer == NEVER:
            return
        item.timer = NEVER
        self._stale_count += 1
        if self._stale_count > STALE_MIN and self._stale_count * 2 > self._entry_count:
            self._remove_stale()
            self._stale_count = 0

    def pop_due(self, now: float) -> ItemT | None:
        """Remove and return the first item that is due, or return None if no item is due."""
        while self.next_at <= now:
            if not self._due:
                self._due_at = heappop(self._heap)
                self._shared_at = NEVER
                items = self._items.pop(self._due_at)
                self._due = items[::-1] if isinstance(items, list) else [items]
            item = self._due.pop()
            self._entry_count -= 1
            self._look_next()
            if item.timer == self._due_at:
                item.timer = NEVER
                return item
            self._stale_count -= 1
        return None

    def clear(self) -> None:
        """Remove all items. The ``timer`` of each item is not changed."""
        self._heap.clear()
        self._items.clear()
        self._due.clear()
        self._entry_count = self._stale_count = 0
        self.next_at = self._shared_at = NEVER

    def _look_next(self) -> None:
        if self._due:
            self.next_at = self._due_at
        else:
            self.next_at = self._heap[0] if self._heap else NEVER

    def _remove_stale(self) -> None:
        """Rebuild the heap without its stale entries."""
        self._due = [item for item in self._due if item.timer == self._due_at]
        left: dict[float, ItemT | list[ItemT]] = {}
        self._entry_count = len(self._due)
        for at, items in self._items.items():
            if not isinstance(items, list):
                if items.timer == at:
                    left[at] = items
                    self._entry_count += 1
            elif live := [item for item in items if item.timer == at]:
                left[at] = live
                self._entry_count += len(live)
        self._items, self._shared_at = left, NEVER
        self._heap = list(left)
        heapify(self._heap)
        self._look_next()


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
