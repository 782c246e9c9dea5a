"""The wall clock that proxies share: the store's, whatever is done to the machine's."""

import pytest

from popgate.domain.errors import StateUnavailable
from popgate.runtime.clocks import ManualClock
from popgate.runtime.shared_clock import KEPT_SECONDS, SharedClock

HOUR = 3_600.0


class Store:
    """Answers its time after ``trip_seconds`` of ``own``, in the middle of which it has looked."""

    def __init__(self, own: ManualClock) -> None:
        self.ahead_seconds = 100.0
        self.trip_seconds = 0.25
        self.is_away = False
        self._own = own
        self._began = own.wall() - own.monotonic()

    def now(self) -> float:
        return self._own.monotonic() + self._began + self.ahead_seconds

    async def ask(self) -> float:
        if self.is_away:
            raise StateUnavailable("Redis is away")
        self._own.advance(self.trip_seconds / 2)
        now = self.now()
        self._own.advance(self.trip_seconds / 2)
        return now


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_the_time_is_the_stores_whatever_is_done_to_the_machines_clock(jump: float) -> None:
    own = ManualClock()
    store = Store(own)
    clock = SharedClock(own, store.ask)
    assert clock.wall() == own.wall()
    await clock.look()
    assert clock.wall() == store.now()
    own.jump_wall(jump)
    assert clock.wall() == store.now()
    own.advance(5.0)
    await clock.look()
    assert clock.wall() == store.now()
    assert clock.monotonic() == own.monotonic()


async def test_while_the_store_is_away_the_time_goes_on() -> None:
    own = ManualClock()
    store = Store(own)
    clock = SharedClock(own, store.ask)
    await clock.look()
    store.is_away = True
    own.advance(1_000.0)
    with pytest.raises(StateUnavailable):
        await clock.look()
    assert clock.wall() == store.now()


async def test_a_slow_answer_does_not_take_the_place_of_a_quick_one_before_that_is_old() -> None:
    own = ManualClock()
    store = Store(own)
    clock = SharedClock(own, store.ask)
    await clock.look()
    before = store.now() - clock.wall()
    store.trip_seconds, store.ahead_seconds = 8.0, 90.0
    await clock.look()
    assert store.now() - clock.wall() == before - 10.0
    own.advance(KEPT_SECONDS)
    await clock.look()
    assert clock.wall() == store.now()
