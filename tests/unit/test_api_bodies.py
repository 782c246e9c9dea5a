"""Bodies that would take far more memory and time than their bytes: they are refused before they are decoded."""

import time
from collections.abc import Mapping

import pytest
from msgspec import Raw, msgpack

from popgate.api.formats import STRUCTURE_BYTES_MAX
from popgate.api.reading import POP, PUBLISH, new_messages
from popgate.domain.errors import InvalidRequest
from popgate.domain.quotas import Quotas
from popgate.engine.publish.publishing import NewMessage

LARGE = 16 << 20
QUICK_SECONDS = 2.0
"""Far more than a refusal takes, and less than decoding these bodies would take on a slow machine."""


def published(body: bytes, *, packed: bool = False) -> list[NewMessage]:
    return new_messages(PUBLISH.read(body, packed), Quotas())


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b"{}," * (LARGE // 3),
        b'{"messages":[{"headers":{' + b'"a":1,' * (LARGE // 6),
        b'{"messages":[{"body":' + b"[" * LARGE,
        b'{"messages":[{"body":[' + b"[]," * (LARGE // 3),
        b'"' + b'\\"' * (LARGE // 2) + b"\\",
        b" " * LARGE,
    ],
    ids=lambda body: body[:24].decode(),
)
def test_json_of_many_small_parts_is_refused_at_once(body: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        published(body)
    assert time.monotonic() - began < QUICK_SECONDS


def test_a_large_publish_of_long_texts_is_read() -> None:
    text = '\\"{}[],' * (LARGE // 24)
    body = f'{{"messages":[{",".join([f"""{{"body":"{text}","headers":{{"a":1}}}}"""] * 2)}]}}'.encode()
    assert len(body) > STRUCTURE_BYTES_MAX
    assert [len(one.body) for one in published(body)] == [len(text) - text.count("\\")] * 2


def test_a_filter_of_many_names_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest):
        POP.read(b'{"filter":{' + b'"a":1,' * (LARGE // 6), packed=False)


@pytest.mark.parametrize("body", [b'{"%b":1}', b'{"messages":[{"%b":1}]}'])
def test_an_unknown_field_with_a_long_name_is_told_at_once(body: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="is not a field here") as refused:
        published(body % (b"k" * LARGE))
    assert len(refused.value.detail) < 1_000
    assert time.monotonic() - began < QUICK_SECONDS


def packed(**fields: object) -> bytes:
    return msgpack.encode({"messages": [fields]})


WRONG: list[tuple[Mapping[str, object], str]] = [
    ({"body": [{}] * 100_000}, "messages[0].body must be a string or bytes"),
    ({"body": 7}, "messages[0].body must be a string or bytes"),
    ({"body": None}, "messages[0].body must be a string or bytes"),
    ({"body": "", "headers": {"a": [{}] * 100_000}}, "messages[0].headers.a: the value must be"),
    ({"body": "", "headers": {str(number): 1 for number in range(5_000)}}, "messages[0].headers must have at most"),
    ({"body": Raw(b"\xa1\xff")}, "messages[0].body is text that is not valid UTF-8"),
    ({}, "messages[0].body or body_base64 is required"),
    ({"body": "", "body_base64": ""}, "has both body and body_base64"),
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=range(len(WRONG)))
def test_messagepack_is_read_as_what_it_must_be(fields: Mapping[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told.replace("[", r"\[").replace(".", r"\.")):
        published(packed(**fields), packed=True)


@pytest.mark.parametrize("body", ["grüße", b"\x00\xff", "", b""])
def test_a_body_in_messagepack_is_text_or_bytes(body: str | bytes) -> None:
    (message,) = published(packed(body=body, headers={"a": None, "b": 1.5}), packed=True)
    assert message.body == (body.encode() if isinstance(body, str) else body)
    assert message.headers == {"a": None, "b": 1.5}
