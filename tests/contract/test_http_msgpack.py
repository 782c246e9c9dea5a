"""MessagePack beside JSON: the same interface with bodies as raw bytes (decision 1)."""

from typing import Any

import httpx
import msgspec
import pytest

from contract.http_server import Topic, problem
from contract.http_server import lean_server as server

__all__ = ["server"]

MSGPACK = "application/msgpack"


def post(
    topic: Topic, operation: str, body: object, *, raw: bytes | None = None, kind: str = MSGPACK, accept: str = "*/*"
) -> httpx.Response:
    path = f"{topic.path}/messages" if operation == "publish" else f"{topic.group_path}/{operation}"
    content = msgspec.msgpack.encode(body) if raw is None else raw
    return topic.client.post(path, content=content, headers={"content-type": kind, "accept": accept})


def unpacked(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MSGPACK
    return msgspec.msgpack.decode(response.content)


@pytest.mark.parametrize(
    "kind", [MSGPACK, "application/x-msgpack", "application/vnd.msgpack", "Application/MsgPack; v=5"]
)
def test_a_body_goes_in_and_comes_out_as_bytes(topic: Topic, kind: str) -> None:
    body = bytes(range(256))
    headers = {"text": "grün", "int": -(2**63), "float": 1.5, "yes": True, "nothing": None}
    message = {"body": body, "headers": headers, "message_id": "m", "ordering_key": "k"}
    published = unpacked(post(topic, "publish", {"messages": [message]}, kind=kind))
    assert published == {"results": [{"status": "published", "message_id": "m"}]}
    (popped,) = unpacked(post(topic, "pop", {"wait_seconds": 1}))["messages"]
    assert popped["body"] == body
    assert popped["headers"] == headers
    assert popped["ordering_key"] == "k"
    assert popped["delivery_count"] == 1
    settled = unpacked(post(topic, "ack", {"receipt_handles": [popped["receipt_handle"]]}))
    assert settled == {"results": [{"status": "acked"}]}


def test_a_body_may_also_be_a_text_or_base64(topic: Topic) -> None:
    unpacked(post(topic, "publish", {"messages": [{"body": "grün"}, {"body_base64": "eA=="}, {"body": b""}]}))
    bodies: list[bytes] = []
    while len(bodies) < 3:
        bodies += [
            popped["body"]
            for popped in unpacked(post(topic, "pop", {"max_messages": 3, "wait_seconds": 1}))["messages"]
        ]
    assert bodies == ["grün".encode(), b"x", b""]


def test_an_empty_body_is_a_pop_with_all_defaults(topic: Topic) -> None:
    assert unpacked(post(topic, "pop", None, raw=b"")) == {"messages": []}


@pytest.mark.parametrize(
    ("accept", "packed"),
    [
        ("*/*", True),
        ("application/json", False),
        ("application/json, application/msgpack;q=0.5", False),
        ("application/json;q=0.1, application/x-msgpack", True),
        ("application/json;q=nonsense, text/html", True),
    ],
)
def test_accept_chooses_the_format_of_the_answer(topic: Topic, accept: str, packed: bool) -> None:
    kind = post(topic, "pop", {}, accept=accept).headers["content-type"]
    assert kind == (MSGPACK if packed else "application/json")


def test_a_json_request_may_ask_for_messagepack(topic: Topic) -> None:
    topic.publish("x")
    response = topic.client.post(f"{topic.group_path}/pop", json={"wait_seconds": 1}, headers={"accept": MSGPACK})
    assert unpacked(response)["messages"][0]["body"] == b"x"
    response = topic.client.get(topic.group_path, headers={"accept": MSGPACK})
    assert unpacked(response)["in_flight"] == 1


def test_problems_are_json_in_any_case(topic: Topic) -> None:
    document = problem(post(topic, "pop", {"max_messages": 0}), 400, "invalid_request")
    assert document["field"] == "max_messages"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\xc1", "not valid MessagePack"),
        (b"\x81", "truncated"),
        (b"\x81\xa1\xff\x01", "UTF-8"),
        (b"\x81\x01\x02", "names must be strings"),
        (b"\x81\xa8messages\xdd\xff\xff\xff\xff", "at most 256"),
        (b"\x81\xa8messages\x91\x81\xa4body\xc7\x01\x05a", "a string"),
        (b"\x81\xa8messages\x91\x81\xa4body\xd6\xff\x00\x00\x00\x00", "a string"),
        (b"\x81\xa8messages\x91\x81\xa4body" + b"\x91" * 100_000 + b"\x01", "too deeply"),
        (b'{"messages":[]}', "not valid MessagePack"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_damaged_body_is_refused_in_words(topic: Topic, raw: bytes, says: str) -> None:
    assert says in problem(post(topic, "publish", None, raw=raw), 400, "invalid_request")["detail"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**64 - 1, b"bytes", [1]])
def test_a_header_value_that_json_has_no_word_for_is_refused(topic: Topic, value: object) -> None:
    body = {"messages": [{"body": b"x", "headers": {"a": value}}]}
    assert problem(post(topic, "publish", body), 400, "invalid_request")["field"] == "messages[0].headers.a"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_seconds_must_be_finite_and_in_range(topic: Topic, value: float) -> None:
    assert problem(post(topic, "pop", {"wait_seconds": value}), 400, "invalid_request")["field"] == "wait_seconds"


def test_the_admin_interface_reads_json_only(topic: Topic) -> None:
    response = topic.client.put(topic.admin_path, content=b"\x80", headers={"content-type": MSGPACK})
    assert "application/json" in problem(response, 415, "unsupported_media_type")["detail"]
