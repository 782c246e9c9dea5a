"""Packed dead letters: headers that a broker can't carry are put before the body, and are restored unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.dead_letter import (
    DeadLetterDetails,
    dead_letter_details,
    dead_letter_headers,
    packed,
    publisher_headers,
    unpacked,
)
from popgate.domain.message import HeaderValue, Message
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName

NOTE = DeadLetterDetails("rejected", "bad", 3, 7, 1_795_000_000.0, 1_795_000_060.5)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
NAMES = TEXTS.filter(lambda name: not name.startswith("x-popgate-"))
VALUES = st.recursive(
    TEXTS
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def letter(headers: dict[str, HeaderValue], body: bytes) -> Message:
    subscription = Subscription(TopicName("orders"), GroupName("billing"))
    noted = dead_letter_headers(headers, NOTE, subscription, CopyId("0" * 32))
    return Message(CopyId("1" * 32), "m", body, noted, "key", 1.5)


@given(st.dictionaries(NAMES, VALUES, max_size=5), st.binary(max_size=50))
def test_a_packed_letter_comes_back_as_it_was(headers: dict[str, HeaderValue], body: bytes) -> None:
    whole = letter(headers, body)
    small = packed(whole)
    assert publisher_headers(small.headers) == {}
    assert dead_letter_details(small.headers) == NOTE
    assert unpacked(small) == whole


def test_a_letter_that_was_not_packed_stays_as_it_is() -> None:
    whole = letter({"a": 1}, b"{}")
    assert unpacked(whole) is whole


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 2**40, -1, True, "2", 2.0, None])
@pytest.mark.parametrize("body", [b"", b"no", b"[]", b"{}x", b"[" * 100_000])
def test_a_forged_letter_never_breaks_a_list(size: HeaderValue, body: bytes) -> None:
    forged = letter({"x-popgate-dead-headers-bytes": size}, body)
    assert unpacked(forged).body in {body, body[2:]}


@pytest.mark.parametrize(
    "headers",
    [b"[" * 300 + b"]" * 300, b"1" * 40, b'"\\ud800"', b"NaN", b'{"\\udfff":1}'],
    ids=lambda raw: raw[:9].decode(),
)
def test_a_forged_packed_letter_has_only_headers_that_can_be_shown(headers: bytes) -> None:
    raw = b'{"a":' + headers + b"}"
    forged = letter({"x-popgate-dead-headers-bytes": len(raw)}, raw + b"body")
    assert unpacked(forged) is forged


def test_a_letter_that_claims_more_headers_than_it_has_bytes_stays_as_it_is() -> None:
    forged = letter({"x-popgate-dead-headers-bytes": 3}, b"{}")
    assert unpacked(forged) is forged


def test_no_packed_letter_is_larger_than_a_message_may_be() -> None:
    body = bytes(16 * 1024 * 1024)
    small = packed(letter({"large": "x" * 1000}, body))
    assert small.body is body
    assert (publisher_headers(small.headers), dead_letter_details(small.headers)) == ({}, NOTE)


@pytest.mark.parametrize("at", [-1.0, 1e308, float("inf"), float("nan"), True, "now"])
def test_a_note_with_an_impossible_time_is_as_good_as_none(at: HeaderValue) -> None:
    note = dead_letter_details({"x-popgate-dead-at": at, "x-popgate-first-delivered-at": at})
    assert (note.dead_lettered_at, note.first_delivered_at) == (None, None)


@pytest.mark.parametrize("count", [-1, 2**31, 2**63, True, 1.0, "1"])
def test_a_note_with_an_impossible_count_is_as_good_as_none(count: HeaderValue) -> None:
    note = dead_letter_details({"x-popgate-delivery-count": count, "x-popgate-dead-queue": count})
    assert (note.delivery_count, note.queue) == (None, None)
