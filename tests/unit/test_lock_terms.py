"""How long the client trusts a lock, and when it renews it: in simulated time."""

import random

import pytest

from popgate_client import LockNotFound, PopgateError, RetryLater, ServerUnreachable
from popgate_client.errors import LockLost
from popgate_client.lock_terms import LockTerm, term_clock

TTL = 30.0
REFUSED = ServerUnreachable("server_unreachable", "no answer: refused")


def term(asked_at: float = 100.0) -> LockTerm:
    return LockTerm("nightly", TTL, asked_at, random.Random(1))


def test_it_is_trusted_for_its_time_from_when_it_was_asked_for() -> None:
    lock = term()
    assert lock.lost(129.999) is None
    loss = lock.lost(130.0)
    assert loss is not None
    assert "nightly was not renewed within 30 s" in loss.detail


def test_it_is_renewed_at_about_a_third_and_the_term_counts_from_the_question() -> None:
    lock = term()
    assert 9.0 <= lock.rest_seconds(100.0) <= 10.0
    assert lock.rest_seconds(111.0) == 0.0
    lock.renewed(asked_at=111.0, now=115.0)
    assert lock.lost(140.9) is None
    assert lock.lost(141.0) is not None


def test_what_is_lost_stays_lost_whatever_comes_later() -> None:
    lock = term()
    lock.renewed(asked_at=129.0, now=130.1)  # the answer came too late
    assert lock.lost(130.2) is not None
    lock.renewed(asked_at=130.2, now=130.3)
    lock.failed(REFUSED, 130.4)
    assert lock.lost(101.0) is not None


@pytest.mark.parametrize("error", [REFUSED, RetryLater("broker_unavailable", "away"), PopgateError("odd", "odd")])
def test_failures_are_repeated_often_and_end_only_with_its_time(error: PopgateError) -> None:
    lock, now, asked = term(), 110.0, 0
    while lock.lost(now) is None:
        lock.failed(error, now)
        asked += 1
        now += max(0.001, lock.rest_seconds(now))
    assert 130.0 <= now < 130.1
    assert 5 <= asked <= 40
    loss = lock.lost(now)
    assert loss is not None
    assert error.detail in loss.detail


def test_a_server_that_asks_for_patience_does_not_get_more_than_there_is() -> None:
    lock, error = term(), RetryLater("broker_unavailable", "away", 503)
    error.retry_after_seconds = 600
    lock.failed(error, 110.0)
    assert lock.rest_seconds(110.0) <= TTL / 6 + 1


@pytest.mark.parametrize("error", [LockLost("lock_lost", "deleted", 409), LockNotFound("lock_not_found", "gone", 404)])
def test_the_servers_word_ends_it_at_once(error: PopgateError) -> None:
    lock = term()
    lock.failed(error, 101.0)
    loss = lock.lost(101.0)
    assert loss is not None
    assert (loss.code, loss.detail) == ("lock_lost", error.detail)


def test_an_answer_is_waited_for_a_part_of_the_term_only() -> None:
    lock = term()
    assert lock.answer_seconds(110.0) == TTL / 3
    assert lock.answer_seconds(125.0) == 5.0
    assert lock.answer_seconds(140.0) > 0


def test_the_clock_goes_on() -> None:
    assert 0 <= term_clock() - term_clock() + 1 <= 1
