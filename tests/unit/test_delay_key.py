"""The arithmetic of RabbitMQ's delay levels: a key means the sum of its levels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.adapters.rabbitmq.delay_key import (
    DELAY_SECONDS_END,
    LEVELS,
    delay_key,
    entry_level,
    level_milliseconds,
    levels_passed,
    passes_pattern,
    place_pattern,
    waits_pattern,
    whole_seconds,
)
from popgate.domain.names import QUEUES_MAX, TopicName
from popgate.domain.topics import DELAY_SECONDS_MAX

SECONDS = st.integers(1, DELAY_SECONDS_MAX)
TOPICS = st.from_regex(r"\A[A-Za-z0-9._-]{1,64}\Z").map(TopicName)
INDEXES = st.integers(0, QUEUES_MAX - 1)


def matches(pattern: str, key: str) -> bool:
    """Match as a topic exchange does, for patterns with # at their end only."""
    wanted, words = pattern.split("."), key.split(".")
    if wanted[-1] == "#":
        wanted = wanted[:-1]
        words = words[: len(wanted)]
    return len(wanted) == len(words) and all(want in ("*", word) for want, word in zip(wanted, words, strict=True))


def walked(key: str, entry: int) -> list[int]:
    """Return the levels at which a message with this key waits, according to the bindings."""
    waits: list[int] = []
    for level in range(entry, -1, -1):
        assert matches(waits_pattern(level), key) != matches(passes_pattern(level), key), "one way, and only one"
        if matches(waits_pattern(level), key):
            waits.append(level)
    return waits


@given(seconds=SECONDS, topic=TOPICS, index=INDEXES)
def test_the_levels_on_the_way_add_up_to_the_delay(seconds: int, topic: TopicName, index: int) -> None:
    key = delay_key(seconds, topic, index)
    waits = walked(key, entry_level(seconds))
    assert waits == levels_passed(seconds)
    assert waits[0] == entry_level(seconds), "it enters where it waits first"
    assert sum(1 << level for level in waits) == seconds
    total = sum(level_milliseconds(level) for level in waits)
    assert 1000 * seconds < total <= 1000 * seconds + LEVELS


@given(topic=TOPICS, index=INDEXES, other=st.tuples(TOPICS, INDEXES), seconds=SECONDS)
def test_a_key_leads_to_its_own_place_only(
    topic: TopicName, index: int, other: tuple[TopicName, int], seconds: int
) -> None:
    key = delay_key(seconds, topic, index)
    assert len(key.encode()) <= 255
    assert matches(place_pattern(topic, index), key)
    assert matches(place_pattern(*other), key) == (other == (topic, index))


@pytest.mark.parametrize(("topic", "index", "other"), [("a.0", 1, "a"), ("0.1", 1, "1"), ("x.a", 3, "a")])
def test_dots_in_a_name_end_no_word(topic: str, index: int, other: str) -> None:
    assert not matches(place_pattern(TopicName(other), index), delay_key(1, TopicName(topic), index))


@given(st.floats(0, DELAY_SECONDS_MAX, exclude_min=True))
def test_a_delay_is_rounded_up(delay_seconds: float) -> None:
    seconds = whole_seconds(delay_seconds)
    assert seconds - 1 < delay_seconds <= seconds
    assert entry_level(seconds) < LEVELS


def test_the_longest_delay_fits_and_a_longer_one_is_a_bug() -> None:
    assert entry_level(DELAY_SECONDS_MAX) == LEVELS - 1
    assert level_milliseconds(LEVELS - 1) < 2**32, "RabbitMQ's limit of x-message-ttl"
    with pytest.raises(AssertionError):
        entry_level(DELAY_SECONDS_END)
    with pytest.raises(AssertionError):
        entry_level(0)
