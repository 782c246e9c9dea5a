"""The retry back-off, and the names and queue indexes of the domain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.errors import InvalidRequest
from popgate.domain.names import queue_index, topic_name
from popgate.domain.topics import RetryPolicy


def test_the_default_policy_retries_at_once() -> None:
    assert [RetryPolicy().delay_seconds(count) for count in (1, 2, 16)] == [0.0, 0.0, 0.0]


def test_the_delay_grows_by_the_multiplier_up_to_the_maximum() -> None:
    policy = RetryPolicy(initial_seconds=1, multiplier=3, max_seconds=20)
    assert [policy.delay_seconds(count) for count in (1, 2, 3, 4, 5)] == [1, 3, 9, 20, 20]


@given(st.integers(1, 10_000_000), st.floats(1, 100))
def test_the_delay_never_passes_its_maximum_however_often_a_message_came(count: int, multiplier: float) -> None:
    policy = RetryPolicy(initial_seconds=0.5, multiplier=multiplier, max_seconds=60)
    assert 0.5 <= policy.delay_seconds(count) <= 60


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a/b", "ä", "a:b", "a\n"])
def test_a_bad_name_is_refused_naming_the_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        topic_name(name, field="topic")
    assert caught.value.field == "topic"


def test_the_queue_of_an_ordering_key_is_the_same_for_ever() -> None:
    assert [queue_index(key, 8) for key in ("order-1", "order-2", "käse", "")] == [7, 5, 7, 0]
