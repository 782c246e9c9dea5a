"""The pace of arrivals: bursts and dense streams make pops wait for more, single messages and thin streams do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.engine.subscription.collecting import (
    BURST_MIN,
    COLLECT_SECONDS,
    FORGET_SECONDS,
    LONE_MAX,
    QUIET_SECONDS,
    STREAM_MIN,
    Pace,
)

MOMENT = COLLECT_SECONDS / 5
PAUSES = st.sampled_from([0.0, MOMENT, 3 * MOMENT, COLLECT_SECONDS, QUIET_SECONDS, 0.5, FORGET_SECONDS])
ARRIVALS = st.lists(st.tuples(PAUSES, st.integers(1, 20)), max_size=50)
"""Pauses, and how many messages came together after each."""


def expectations(pace: Pace, *times: float, count: int = 1) -> list[bool]:
    """Return what ``pace`` expects after each arrival of ``count`` messages."""
    expected: list[bool] = []
    for now in times:
        pace.arrived(count, now)
        expected.append(pace.expects_more(now))
    return expected


def lone(pace: Pace, number: int, *, start: float = 0.0, pause: float = 0.1) -> list[bool]:
    return expectations(pace, *(start + one * pause for one in range(number)))


def after(pace: Pace, arrivals: list[tuple[float, int]]) -> float:
    """Record ``arrivals`` in ``pace``; return the time of the last one."""
    now = 0.0
    for pause, count in arrivals:
        now += pause
        pace.arrived(count, now)
    return now


def burst(pace: Pace, now: float, *, followers: int = BURST_MIN) -> bool:
    """Tell whether more was expected after the first message."""
    pace.arrived(1, now)
    is_expected = pace.expects_more(now)
    pace.arrived(followers, now + MOMENT)
    return is_expected


def test_nothing_is_expected_before_the_first_message() -> None:
    assert not Pace().expects_more(0.0)


def test_the_first_message_may_begin_a_burst() -> None:
    pace = Pace()
    pace.arrived(1, 0.0)
    assert pace.expects_more(0.0)
    assert pace.expects_more(COLLECT_SECONDS - MOMENT)
    assert not pace.expects_more(COLLECT_SECONDS)


def test_a_few_lone_messages_do_not_hide_the_burst_after_them() -> None:
    pace = Pace()
    lone(pace, LONE_MAX - 1)
    assert burst(pace, 1.0)


def test_no_burst_is_expected_after_many_lone_messages() -> None:
    assert lone(Pace(), LONE_MAX + 3) == [True] * LONE_MAX + [False] * 3


def test_a_burst_makes_the_next_one_expected() -> None:
    pace = Pace()
    lone(pace, LONE_MAX + 1)
    assert not burst(pace, 1.0)
    assert burst(pace, 2.0)


def test_fewer_followers_than_a_burst_has_do_not_make_one() -> None:
    pace = Pace()
    for number in range(LONE_MAX):
        assert burst(pace, float(number), followers=BURST_MIN - 1)
    assert not burst(pace, float(LONE_MAX))


def test_a_burst_is_expected_again_after_a_long_silence() -> None:
    pace = Pace()
    lone(pace, LONE_MAX + 1)
    assert burst(pace, 1.0 + FORGET_SECONDS)


def test_messages_that_come_together_are_not_a_burst_of_which_more_is_to_come() -> None:
    """The embedded broker delivers messages together that were published together."""
    assert expectations(Pace(), *(0.1 * number for number in range(LONE_MAX + 1)), count=10)[-1] is False


@pytest.mark.parametrize("rate", [1, 20, 49, 100, 500])
def test_single_messages_at_a_steady_rate_do_not_wait(rate: int) -> None:
    assert not any(lone(Pace(), 500, pause=1 / rate)[LONE_MAX + 3 :])


def test_a_stream_of_500_a_second_that_its_broker_delivers_in_twos_does_not_wait() -> None:
    assert not any(expectations(Pace(), *(number / 250 for number in range(500)), count=2)[4:])


@pytest.mark.parametrize("rate", [2_500, 5_000, 20_000])
def test_a_dense_stream_waits(rate: int) -> None:
    assert all(lone(Pace(), 2_000, pause=1 / rate)[STREAM_MIN + 1 :])


def test_a_stream_that_becomes_thin_does_not_wait_any_more() -> None:
    pace = Pace()
    lone(pace, 1_000, pause=1 / 5_000)
    assert not any(lone(pace, 100, start=0.2, pause=1 / 500)[10:])


@given(ARRIVALS)
def test_more_is_expected_only_while_messages_arrive(arrivals: list[tuple[float, int]]) -> None:
    pace = Pace()
    last = after(pace, arrivals)
    assert not pace.expects_more(last + QUIET_SECONDS)


@given(ARRIVALS)
def test_a_dense_stream_waits_whatever_came_before(arrivals: list[tuple[float, int]]) -> None:
    pace = Pace()
    start = after(pace, arrivals)
    assert lone(pace, 100, start=start, pause=1 / 5_000)[-1]


@given(ARRIVALS, st.floats(0.001, COLLECT_SECONDS))
def test_a_burst_is_expected_after_another_one_whatever_came_before(
    arrivals: list[tuple[float, int]], later: float
) -> None:
    pace = Pace()
    start = after(pace, arrivals)
    burst(pace, start + 1.0)
    assert burst(pace, start + 2.0 + later)


@given(ARRIVALS)
def test_single_messages_stop_waiting_whatever_came_before(arrivals: list[tuple[float, int]]) -> None:
    pace = Pace()
    start = after(pace, arrivals)
    assert not lone(pace, LONE_MAX + 2, start=start + 0.1)[-1]
