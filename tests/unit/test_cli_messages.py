"""Messages as lines of JSON, in and out."""

import base64
import json
from typing import Any

import pytest

from popgate.cli.messages import MESSAGE_COLUMNS, BadMessage, Defaults, outgoing, outgoing_from_json, popped
from popgate.cli.printing import JsonObject, clipped, json_line
from popgate_client import Message, OutgoingMessage

NOTHING = Defaults(headers={}, ordering_key=None, message_id=None)


def read(line: str | bytes, defaults: Defaults = NOTHING) -> OutgoingMessage:
    return outgoing_from_json(line.encode() if isinstance(line, str) else line, defaults)


def message(body: bytes, **fields: Any) -> Message:
    given: dict[str, Any] = {
        "topic": "orders",
        "group": "billing",
        "receipt_handle": "AQ",
        "queue": 2,
        "delivery_count": 1,
        "first_delivered_at": 1.5,
        "invisible_until": 31.5,
        **fields,
    }
    return Message(body=body, **given)


def test_a_line_may_say_everything_about_a_message() -> None:
    line = '{"body":"hällo","headers":{"n":1,"b":true},"message_id":"m","ordering_key":"k","delay_seconds":5}'
    wanted = OutgoingMessage(
        body="hällo", headers={"n": 1, "b": True}, message_id="m", ordering_key="k", delay_seconds=5
    )
    assert read(line) == wanted
    assert dict(read(line).headers or {}) == {"n": 1, "b": True}


def test_a_body_may_be_base64_and_may_be_empty() -> None:
    assert read('{"body_base64":"AP8="}').body == b"\x00\xff"
    assert read('{"body_base64":""}').body == b""
    assert read('{"body":""}').body == ""


def test_flags_hold_for_every_line_that_does_not_say_otherwise() -> None:
    defaults = Defaults(headers={"a": "flag", "b": "flag"}, ordering_key="flag", message_id=None)
    read_one = read('{"body":"x","headers":{"b":"line"}}', defaults)
    assert (dict(read_one.headers or {}), read_one.ordering_key) == ({"a": "flag", "b": "line"}, "flag")
    assert read('{"body":"x","ordering_key":"line"}', defaults).ordering_key == "line"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not JSON"),
        ("hello", "not JSON"),
        (b"\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ("{}", "either body or body_base64"),
        ('{"body":"a","body_base64":"YQ=="}', "either body or body_base64"),
        ('{"body":5}', "body must be a string"),
        ('{"body":{"a":1}}', "body must be a string"),
        ('{"body_base64":"?"}', "not base64"),
        ('{"body_base64":5}', "not base64"),
        ('{"body":"a","headers":[]}', "headers must be an object"),
        ('{"body":"a","message_id":5}', "message_id must be a string"),
        ('{"body":"a","ordering_key":true}', "ordering_key must be a string"),
        ('{"body":"a","delay_seconds":"5"}', "delay_seconds must be a number"),
        ('{"body":"a","delay_seconds":true}', "delay_seconds must be a number"),
        ('{"body":"a","bodi":1}', "'bodi' is not a field"),
        ('{"body":"\\ud800"}', "can't be written as JSON"),
        ('{"body":"a","headers":{"n":NaN}}', "can't be written as JSON"),
        ('{"body":"a","delay_seconds":1e999}', "can't be written as JSON"),
    ],
)
def test_a_line_that_is_no_message_is_refused_with_the_reason(line: str | bytes, reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        read(line)


def test_a_popped_message_is_printed_in_the_words_of_the_http_interface() -> None:
    row = popped(message(b"hello", message_id="m", headers={"n": 1}, published_at=1.0))
    assert row == {
        "message_id": "m",
        "receipt_handle": "AQ",
        "body": "hello",
        "headers": {"n": 1},
        "queue": 2,
        "delivery_count": 1,
        "published_at": 1.0,
        "first_delivered_at": 1.5,
        "invisible_until": 31.5,
    }


@pytest.mark.parametrize("body", [b"", "grüße\n\u2028".encode(), b"\x1b[31m\x7f", bytes(range(256)), b"\xff" * 3])
def test_what_is_printed_can_be_published_again_byte_for_byte(body: bytes) -> None:
    line = json_line(popped(message(body, message_id="m", ordering_key="k", headers={"a": None})))
    again = read(line)
    assert (again.body.encode() if isinstance(again.body, str) else again.body) == body
    assert (again.message_id, again.ordering_key, dict(again.headers or {})) == ("m", "k", {"a": None})
    plain = outgoing(body, NOTHING).body
    assert (plain.encode() if isinstance(plain, str) else plain) == body


def test_a_line_is_one_line_and_harmless_on_a_terminal() -> None:
    line = json_line(popped(message("a\nb\x1b[2J\x7f\x9b1m".encode())))
    assert line.isprintable()
    assert json.loads(line)["body"] == "a\nb\x1b[2J\x7f\x9b1m"


def test_the_table_shows_the_beginning_of_a_text_and_the_size_of_anything_else() -> None:
    column = next(column for column in MESSAGE_COLUMNS if column.title == "BODY")
    assert column.clips

    def body(row: JsonObject) -> str:
        return clipped(column.cell(row))

    assert body({"body": "one\ntwo\x1b[31m"}) == "one\\ntwo\\x1b[31m"
    assert body({"body": "x" * 61}) == "x" * 57 + "..."
    assert body({"body": "x" * 60}) == "x" * 60
    assert body({"body_base64": base64.b64encode(b"\xff\xff").decode()}) == "(binary, 2 B)"
