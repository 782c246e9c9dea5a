"""The choice of the format, and bodies that are refused before they reach an engine."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.api import reading
from popgate.api.formats import REMEMBERED_MAX, check_json, negotiate
from popgate.domain.errors import InvalidRequest
from popgate.domain.quotas import DEFAULTS

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"body": st.text(st.characters(codec="utf-8"))},
        optional={
            "message_id": TEXTS,
            "ordering_key": TEXTS,
            "headers": st.dictionaries(TEXTS.map("h".__add__), TEXTS | st.booleans() | st.none(), max_size=3),
        },
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("content_type", "accept", "packed", "answer_packed"),
    [
        (None, None, False, False),
        ("application/json", "*/*", False, False),
        ("application/x-www-form-urlencoded", "*/*", False, False),
        ("application/msgpack", None, True, True),
        ("APPLICATION/X-MSGPACK; q=1", "*/*", True, True),
        ("application/vnd.msgpack", "application/json", True, False),
        ("application/json", "application/msgpack", False, True),
        ("application/json", "application/msgpack;q=0.5, application/json", False, False),
        ("application/json", "application/msgpack, application/json", False, False),
        ("application/msgpack", "application/msgpack, application/json", True, True),
        ("application/json", "application/msgpack;q=0", False, False),
        ("application/json", ";;q=,,x", False, False),
        ("\xff\xfe", "\xff", False, False),
    ],
)
def test_the_answer_is_written_as_the_request_unless_accept_prefers_the_other(
    content_type: str | None, accept: str | None, packed: bool, answer_packed: bool
) -> None:
    given_headers = {b"content-type": content_type, b"accept": accept}
    headers = {name: value.encode("latin-1") for name, value in given_headers.items() if value is not None}
    form = negotiate(headers)
    assert (form.packed, form.answer_packed) == (packed, answer_packed)


def test_ever_new_content_types_take_no_memory() -> None:
    from popgate.api import formats

    for number in range(2 * REMEMBERED_MAX):
        negotiate({b"content-type": b"x/%d" % number})
    assert len(formats._remembered) <= REMEMBERED_MAX  # pyright: ignore[reportPrivateUsage]  # what is tested


@given(JSON_VALUES)
def test_names_that_stand_once_are_never_refused(value: Any) -> None:
    check_json(json.dumps(value).encode())


@given(JSON_VALUES, st.text(), st.booleans())
def test_a_name_that_stands_twice_is_refused_wherever_it_stands(value: Any, name: str, nested: bool) -> None:
    pair = f"{json.dumps(name)}:{json.dumps(value)}"
    twice = "{" + pair + "," + pair + "}"
    with pytest.raises(InvalidRequest):
        check_json((f'{{"outer":[{twice}]}}' if nested else twice).encode())


def test_many_names_are_compared_in_no_time() -> None:
    """Comparing each name with all others took 5 s for 16,000 of them, and blocked the event loop."""
    names = ",".join(f'"{number}":1' for number in range(100_000))
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="99999 occurs twice"):
        check_json(f'{{{names},"99999":2}}'.encode())
    assert time.process_time() - began < 2


@given(MESSAGES, st.booleans())
def test_any_valid_publish_is_read_as_it_was_written(messages: list[dict[str, Any]], ascii_only: bool) -> None:
    body = json.dumps({"messages": messages}, ensure_ascii=ascii_only).encode()
    read = reading.new_messages(reading.PUBLISH.read(body, packed=False), DEFAULTS)
    for wanted, message in zip(messages, read, strict=True):
        assert message.body.decode() == wanted["body"]
        assert message.message_id == wanted.get("message_id")
        assert message.ordering_key == wanted.get("ordering_key")
        assert dict(message.headers) == wanted.get("headers", {})


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_at_all_raise_anything_but_a_complaint(body: bytes, packed: bool) -> None:
    for reader in (reading.PUBLISH, reading.POP, reading.ACK, reading.RELEASE, reading.EXTEND, reading.REJECT):
        with suppress(InvalidRequest):
            reader.read(body, packed)
