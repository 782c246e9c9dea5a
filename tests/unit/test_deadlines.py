"""The one timer: due in order, never early, bounded a tick, and it leaves nothing behind."""

import asyncio

import pytest

from popgate.runtime.clocks import ManualClock
from popgate.runtime.deadlines import DUE_BATCH_MAX, NEVER, STALE_MIN, DeadlineHeap, Deadlines


class Item:
    def __init__(self, log: list[str], name: str, again: float | None = None) -> None:
        self.timer = NEVER
        self._log, self._name, self._again = log, name, again

    def due(self, now: float) -> float | None:
        self._log.append(self._name)
        again, self._again = self._again, None
        return again


async def test_items_come_due_in_order_and_never_early() -> None:
    clock, log = ManualClock(monotonic=0.0), list[str]()
    deadlines = Deadlines(clock)
    for at, name in [(3.0, "c"), (1.0, "a"), (2.0, "b")]:
        deadlines.schedule(at, Item(log, name))
    assert deadlines.tick() == 1.0
    clock.advance(2.0)
    assert deadlines.tick() == 1.0
    assert log == ["a", "b"]
    deadlines.stop()


async def test_an_item_may_ask_to_be_called_again() -> None:
    clock, log = ManualClock(monotonic=0.0), list[str]()
    deadlines = Deadlines(clock)
    deadlines.schedule(1.0, Item(log, "x", again=5.0))
    clock.advance(1.0)
    assert deadlines.tick() == 4.0
    clock.advance(4.0)
    assert deadlines.tick() is None
    assert log == ["x", "x"]


async def test_a_crowd_that_is_due_together_takes_several_ticks() -> None:
    clock, log = ManualClock(monotonic=0.0), list[str]()
    deadlines = Deadlines(clock)
    for _ in range(DUE_BATCH_MAX + 1):
        deadlines.schedule(1.0, Item(log, "x"))
    clock.advance(1.0)
    assert deadlines.tick() == 0.0
    assert len(log) == DUE_BATCH_MAX
    assert deadlines.tick() is None


async def test_an_item_that_gets_another_time_or_none_is_not_called_at_the_former_one() -> None:
    clock, log = ManualClock(monotonic=0.0), list[str]()
    deadlines = Deadlines(clock)
    later, sooner, never = Item(log, "later"), Item(log, "sooner"), Item(log, "never")
    deadlines.schedule(1.0, later)
    deadlines.schedule(3.0, later)
    deadlines.schedule(3.0, sooner)
    deadlines.schedule(2.0, sooner)
    deadlines.schedule(1.0, never)
    deadlines.cancel(never)
    assert len(deadlines) == 2
    for expected in ([], ["sooner"], ["sooner", "later"], ["sooner", "later"]):
        clock.advance(1.0)
        deadlines.tick()
        assert log == expected
    assert len(deadlines) == 0


async def test_what_is_cancelled_does_not_stay_in_memory_until_its_time() -> None:
    clock, log = ManualClock(monotonic=0.0), list[str]()
    deadlines = Deadlines(clock)
    deadlines.schedule(43_200.0, Item(log, "a long lease"))
    for _ in range(20 * STALE_MIN):
        item = Item(log, "settled at once")
        deadlines.schedule(43_200.0, item)
        deadlines.cancel(item)
    assert len(deadlines) == 1
    assert len(deadlines._items._heap) <= 2 * STALE_MIN  # pyright: ignore[reportPrivateUsage]  # it is about memory
    clock.advance(43_200.0)
    deadlines.tick()
    assert log == ["a long lease"]


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_item_that_raises_does_not_stop_the_others(stopped: bool) -> None:
    class Broken:
        timer = NEVER

        def due(self, now: float) -> float | None:
            raise ZeroDivisionError

    loop, errors, log = asyncio.get_running_loop(), list[object](), list[str]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    deadlines = Deadlines(ManualClock(monotonic=0.0))
    if stopped:
        deadlines.stop()
    deadlines.schedule(0.0, Broken())
    deadlines.schedule(0.0, Item(log, "x"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(errors), log) == ((0, []) if stopped else (1, ["x"]))
    deadlines.stop()


def test_items_of_the_same_time_share_an_entry_and_come_due_in_the_order_of_scheduling() -> None:
    heap, log = DeadlineHeap[Item](), list[str]()
    items = [Item(log, f"{number}") for number in range(1_000)]
    for item in items:
        heap.schedule(7.0, item)
    heap.schedule(8.0, items[0])
    assert (heap._heap, len(heap)) == ([7.0, 8.0], 1_000)  # pyright: ignore[reportPrivateUsage]  # it is about memory
    assert heap.pop_due(6.9) is None
    assert [heap.pop_due(7.5) for _ in items] == [*items[1:], None]
    assert (heap.next_at, heap.pop_due(8.0), len(heap)) == (8.0, items[0], 0)


def test_cancelled_items_leave_the_entry_that_they_share_with_others() -> None:
    heap = DeadlineHeap[Item]()
    items = [Item([], f"{number}") for number in range(10 * STALE_MIN)]
    for item in items:
        heap.schedule(7.0, item)
    assert heap.pop_due(7.0) is items[0]
    for item in items[1:-1]:
        heap.cancel(item)
    assert len(heap) == 1
    assert len(heap._due) <= 2 * STALE_MIN  # pyright: ignore[reportPrivateUsage]  # it is about memory
    assert (heap.pop_due(7.0), heap.pop_due(7.0), heap.next_at) == (items[-1], None, NEVER)
