"""What a proxy remembers of the age of messages that only the broker has is never too old."""

from types import SimpleNamespace
from typing import Any

from popgate.engine.queue.buffered import MessageState
from popgate.engine.queue.waiting_since import GUESSED_SECONDS, RETURN_SECONDS, WaitingSince


def buffered(state: MessageState, since: float | None) -> Any:
    message = None if since is None else SimpleNamespace(waiting_since=since)
    return SimpleNamespace(state=state, message=message, first_delivered_at=0.0, rank=0)


def test_a_queue_without_consumers_waits_since_it_was_first_seen_with_messages() -> None:
    waiting, seen = WaitingSince(), list[float | None]()
    for count, now in ((0, 5.0), (3, 10.0), (7, 20.0), (0, 30.0)):
        waiting.counted(count, now)
        seen.append(waiting.at)
    assert seen == [None, 10.0, 10.0, None]


def test_the_oldest_message_that_returns_to_the_broker_is_remembered() -> None:
    waiting = WaitingSince()
    waiting.returned(
        [buffered(MessageState.LEASED, 1.0), buffered(MessageState.READY, 3.0), buffered(MessageState.READY, 2.0)]
    )
    waiting.counted(2, 50.0)
    assert waiting.at == 2.0


def test_a_message_that_comes_after_leased_ones_waits_since_it_was_seen_and_not_since_these_were_published() -> None:
    waiting = WaitingSince()
    waiting.counted(1, 1.0)
    waiting.returned([buffered(MessageState.LEASED, 4.0), buffered(MessageState.DELAYED, 3.0)])
    seen = [waiting.at]
    waiting.counted(1, 90.0)
    assert [*seen, waiting.at] == [None, 90.0]


def test_messages_without_a_publish_time_wait_since_they_were_seen() -> None:
    waiting = WaitingSince()
    waiting.returned([buffered(MessageState.READY, 0.0), buffered(MessageState.READY, None)])
    seen = [waiting.at]
    waiting.counted(2, 7.0)
    assert [*seen, waiting.at] == [None, 7.0]


def test_a_broker_that_tells_the_age_is_believed() -> None:
    waiting = WaitingSince()
    waiting.counted(2, 50.0, 4.0)
    assert waiting.at == 4.0
    waiting.counted(1, 60.0, 5.0)
    assert [waiting.at] == [5.0]


def test_messages_that_were_there_before_the_proxy_looked_have_a_guessed_age() -> None:
    waiting = WaitingSince()
    waiting.counted(3, 10.0)
    assert not waiting.is_guessed(11.0), "clients have a chance to ask"
    assert waiting.is_guessed(10.0 + GUESSED_SECONDS)
    waiting.returned([])
    waiting.counted(3, 30.0)
    assert not waiting.is_guessed(90.0), "the queue was consumed in the meantime"


def test_messages_that_come_to_a_queue_seen_empty_have_a_known_age() -> None:
    waiting = WaitingSince()
    guesses = [waiting.is_guessed(90.0)]
    for count in (0, 1):
        waiting.counted(count, 10.0)
        guesses.append(waiting.is_guessed(90.0))
    assert guesses == [False] * 3


def test_an_age_that_the_broker_tells_is_no_guess() -> None:
    waiting = WaitingSince()
    waiting.counted(2, 50.0, 4.0)
    assert not waiting.is_guessed(90.0)


def test_messages_that_the_broker_has_not_counted_yet_after_their_return_are_not_forgotten() -> None:
    waiting, seen = WaitingSince(), list[float | None]()
    waiting.returned([buffered(MessageState.READY, 2.0)])
    for count, now in ((0, 50.0), (0, 50.1), (1, 50.2), (0, 50.3)):
        waiting.counted(count, now)
        seen.append(waiting.at)
    assert seen == [2.0, 2.0, 2.0, None]


def test_messages_that_the_broker_never_counts_again_are_forgotten() -> None:
    waiting = WaitingSince()
    waiting.returned([buffered(MessageState.READY, 2.0)])
    waiting.counted(0, 50.0)
    waiting.counted(0, 50.0 + RETURN_SECONDS)
    assert waiting.at is None
