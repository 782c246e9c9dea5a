"""The attempts that a lease record and a dead letter keep."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.attempts import (
    ATTEMPTS_MAX,
    ERROR_TEXT_LENGTH_MAX,
    Attempt,
    AttemptEnd,
    Cause,
    described,
    header_of,
    noted,
    read,
    read_header,
    without_attempt,
)
from popgate.domain.dead_letter import DeadLetterDetails, dead_letter_details, dead_letter_headers, publisher_headers
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName

texts = st.text(max_size=40)


@given(texts, st.builds(Cause, texts, texts, texts), texts, st.sampled_from(AttemptEnd))
def test_an_attempt_is_read_as_it_was_noted(reason: str, cause: Cause, why: str, end: AttemptEnd) -> None:
    new = described(reason, end, cause, attempt_reason=why)
    head, attempts = read(noted("", new, 3, 1_000.5, 1_002.25))
    assert head == reason.replace("\x1f", " ") == without_attempt(new)
    (attempt,) = attempts
    assert attempt == Attempt(3, 1_000.5, 1_002.25, end, cause.client, cause.error_type, cause.error_text, why)
    assert read_header(header_of(attempts)) == attempts


def test_the_latest_attempts_are_kept_and_the_reason_stays() -> None:
    reason = "bad"
    for number in range(1, 20):
        reason = noted(reason, described("", AttemptEnd.RELEASED, None), number, number, number + 0.5)
    head, attempts = read(reason)
    assert (head, [one.attempt for one in attempts]) == ("bad", list(range(20 - ATTEMPTS_MAX, 20)))
    assert read(noted(reason, "worse", 20, 0, 0))[0] == "worse"
    assert len(read(noted(reason, "worse", 20, 0, 0))[1]) == ATTEMPTS_MAX


def test_an_attempt_that_was_noted_twice_counts_once() -> None:
    expired = noted("", described("", AttemptEnd.EXPIRED, None), 1, 1, 2)
    released = noted(expired, described("", AttemptEnd.RELEASED, Cause("ValueError")), 1, 1, 3)
    assert [(one.outcome, one.error_type) for one in read(released)[1]] == [("released", "ValueError")]


def test_long_texts_are_cut() -> None:
    new = described("", AttemptEnd.REJECTED, Cause("T" * 999, "m" * 99_999))
    (attempt,) = read(noted("", new, 1, 1, 2))[1]
    assert (len(attempt.error_type), len(attempt.error_text)) == (128, ERROR_TEXT_LENGTH_MAX)


@pytest.mark.parametrize(
    "text", ["\x1f", "\x1f1,2", "\x1f1,2,3,q", "\x1f1,2,3,r{", "\x1f1,2,3,", "\x1fa,b,c,r", "\x1f1,2,3,r[]"]
)
def test_what_can_not_be_read_is_left_out(text: str) -> None:
    assert read(f"bad{text}")[0] == "bad"
    assert [one.attempt for one in read(noted(f"bad{text}", "\x1fr", 7, 1, 2))[1]][-1] == 7


@pytest.mark.parametrize(
    "header", [None, 7, "", "{", "{}", "[1]", '[{"attempt": "x"}]', "[" * 9_999, '[{"attempt": true}]']
)
def test_a_header_that_popgate_would_not_write_has_no_attempts(header: object) -> None:
    assert read_header(header) == []


def test_a_dead_letter_carries_the_last_error_and_the_attempts() -> None:
    first = Attempt(1, 1.0, 2.0, "released", "w-1", "ValueError", "no such order")
    second = Attempt(2, 3.0, 4.0, "expired", "w-2")
    note = DeadLetterDetails("max_deliveries", "max_deliveries", 0, 2, 1.0, 5.0, attempts=(first, second))
    headers = dead_letter_headers({"a": 1}, note, Subscription(TopicName("t"), GroupName("g")), CopyId("1f"))
    assert headers["x-popgate-dead-error-type"] == "ValueError"
    assert headers["x-popgate-dead-error-text"] == "no such order"
    assert headers["x-popgate-dead-client"] == "w-2"
    assert [row["attempt"] for row in json.loads(str(headers["x-popgate-dead-attempts"]))] == [1, 2]
    assert dead_letter_details(headers) == note
    assert publisher_headers(headers) == {"a": 1}
    forged = {"x-popgate-dead-attempts": "[]", "x-popgate-dead-client": "me"}
    plain = dead_letter_headers(forged, DeadLetterDetails(), Subscription(TopicName("t"), GroupName("g")), CopyId("1f"))
    assert not forged.keys() & plain.keys()
