"""The one timer: due in order, never early, bounded a tick."""

from popgate.engine.deadlines import DUE_BATCH_MAX, Deadlines
from popgate.runtime.clocks import ManualClock


class Item:
    def __init__(self, log: list[str], name: str, again: float | None = None) -> None:
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
