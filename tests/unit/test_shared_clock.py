"""The wall clock that proxies share: the store's, even if a machine's clock is set."""

import pytest

from popgate.domain.errors import StateUnavailable
from popgate.runtime.clocks import ManualClock
from popgate.runtime.shared_clock import SharedClock

HOUR = 3_600.0


class Store:
    """Answers its time after ``trip_seconds`` of ``own``; it reads the time in the middle."""

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


@pytest.fixture
def own() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(own: ManualClock) -> Store:
    return Store(own)


@pytest.fixture
def clock(own: ManualClock, store: Store) -> SharedClock:
    return SharedClock(own, store.ask)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_the_time_is_the_stores_whatever_is_done_to_the_machines_clock(
    own: ManualClock, store: Store, clock: SharedClock, jump: float
) -> None:
    assert clock.wall() == own.wall()
    await clock.look()
    shown = clock.wall() - store.now()
    assert abs(shown) <= store.trip_seconds
    own.jump_wall(jump)
    own.advance(5.0)
    assert clock.wall() - store.now() == pytest.approx(shown, abs=1e-6)
    await clock.look()
    assert abs(clock.wall() - store.now()) <= store.trip_seconds
    assert clock.monotonic() == own.monotonic()


@pytest.mark.parametrize("ahead_seconds", [100.0, -100.0])
async def test_the_shortest_round_trip_says_how_close_it_comes(
    store: Store, clock: SharedClock, ahead_seconds: float
) -> None:
    store.ahead_seconds = ahead_seconds
    for trip_seconds in (8.0, 0.25, 8.0):
        store.trip_seconds = trip_seconds
        await clock.look()
    assert abs(clock.wall() - store.now()) <= 0.25


async def test_a_clock_that_is_right_is_left_alone_however_slow_the_store_answers(
    own: ManualClock, store: Store, clock: SharedClock
) -> None:
    store.ahead_seconds, store.trip_seconds = 0.0, 8.0
    await clock.look()
    assert clock.wall() == own.wall()


async def test_while_the_store_is_away_the_time_goes_on(own: ManualClock, store: Store, clock: SharedClock) -> None:
    await clock.look()
    shown = clock.wall() - store.now()
    store.is_away = True
    own.advance(1_000.0)
    with pytest.raises(StateUnavailable):
        await clock.look()
    assert clock.wall() - store.now() == pytest.approx(shown, abs=1e-6)
