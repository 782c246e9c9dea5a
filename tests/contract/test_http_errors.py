"""Requests that the HTTP interface refuses, and its answers (decision 1): problem documents with code, field,
remedy.

Every row is also a promise that no client request is answered with a 500.
"""

import json
import re
import socket
from typing import Any

import httpx
import pytest

from contract.http_server import HttpServer, Topic, answer, problem
from contract.http_server import lean_server as server

__all__ = ["server"]

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def topic(server: HttpServer) -> Topic:
    return server.topic()


def post(topic: Topic, operation: str, body: bytes | str, **headers: str) -> httpx.Response:
    path = f"{topic.path}/messages" if operation == "publish" else f"{topic.group_path}/{operation}"
    return topic.client.post(
        path, content=body, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


# -- fields -----------------------------------------------------------------------------------------------------------


MANY_HANDLES = {"receipt_handles": ["x"] * 257}
INVALID: list[tuple[str, Any, str, str]] = [
    ("publish", {}, "messages", "required"),
    ("publish", [], "", "an object"),
    ("publish", {"messages": []}, "messages", "at least 1"),
    ("publish", {"messages": [{"body": "x"}] * 257}, "messages", "at most 256"),
    ("publish", {"messages": {}}, "messages", "a list"),
    ("publish", {"messages": [1]}, "messages[0]", "an object"),
    ("publish", {"messages": [{}]}, "messages[0].body", "body_base64"),
    ("publish", {"messages": [{"body": "x"}, {"body": None}]}, "messages[1].body", "a string"),
    ("publish", {"messages": [{"body": {"a": 1}}]}, "messages[0].body", "a string"),
    ("publish", {"messages": [{"body": "x", "body_base64": "eA=="}]}, "messages[0].body", "one of them"),
    ("publish", {"messages": [{"body_base64": "eA"}]}, "messages[0].body_base64", "padding"),
    ("publish", {"messages": [{"body_base64": "e A=="}]}, "messages[0].body_base64", "base64"),
    ("publish", {"messages": [{"body_base64": "__8="}]}, "messages[0].body_base64", "base64"),
    ("publish", {"messages": [{"body_base64": 1}]}, "messages[0].body_base64", "a string"),
    ("publish", {"messages": [{"boddy": "x"}]}, "messages[0].boddy", "ordering_key"),
    ("publish", {"messages": [{"body": "x", "delay_seconds": -1}]}, "messages[0].delay_seconds", "at least 0"),
    ("publish", {"messages": [{"body": "x", "delay_seconds": 2_592_001}]}, "messages[0].delay_seconds", "2592000"),
    ("publish", {"messages": [{"body": "x", "delay_seconds": "1"}]}, "messages[0].delay_seconds", "a number"),
    ("publish", {"messages": [{"body": "x", "ttl_seconds": 0}]}, "messages[0].ttl_seconds", "more than 0"),
    ("publish", {"messages": [{"body": "x", "ttl_seconds": 31_536_001}]}, "messages[0].ttl_seconds", "31536000"),
    ("publish", {"messages": [{"body": "x", "message_id": ""}]}, "messages[0].message_id", "at least 1"),
    ("publish", {"messages": [{"body": "x", "message_id": "m" * 256}]}, "messages[0].message_id", "at most 255"),
    ("publish", {"messages": [{"body": "x", "message_id": "é" * 128}]}, "messages[0].message_id", "255 bytes"),
    ("publish", {"messages": [{"body": "x", "message_id": 7}]}, "messages[0].message_id", "a string"),
    ("publish", {"messages": [{"body": "x", "ordering_key": ""}]}, "messages[0].ordering_key", "at least 1"),
    ("publish", {"messages": [{"body": "x", "ordering_key": "é" * 128}]}, "messages[0].ordering_key", "255 bytes"),
    ("publish", {"messages": [{"body": "x", "headers": []}]}, "messages[0].headers", "an object"),
    ("publish", {"messages": [{"body": "x", "headers": {"a": [1]}}]}, "messages[0].headers.a", "a string, a number"),
    ("publish", {"messages": [{"body": "x", "headers": {"a": {}}}]}, "messages[0].headers.a", "a string, a number"),
    ("publish", {"messages": [{"body": "x", "headers": {"": 1}}]}, "messages[0].headers.", "1 to 255"),
    ("publish", {"messages": [{"body": "x", "headers": {"é" * 128: 1}}]}, "messages[0].headers." + "é" * 80, "255"),
    (
        "publish",
        {"messages": [{"body": "x", "headers": {"X-Popgate-a": 1}}]},
        "messages[0].headers.X-Popgate-a",
        "reserved",
    ),
    ("publish", {"messages": [{"body": "x", "headers": {"a": 2**63}}]}, "messages[0].headers.a", "64 bits"),
    ("publish", {"messages": [{"body": "x", "headers": {"a": -(2**63) - 1}}]}, "messages[0].headers.a", "64 bits"),
    ("pop", [], "", "an object"),
    ("pop", {"max_messages": 0}, "max_messages", "at least 1"),
    ("pop", {"max_messages": 257}, "max_messages", "at most 256"),
    ("pop", {"max_messages": 10**30}, "max_messages", "at most 256"),
    ("pop", {"max_messages": 1.5}, "max_messages", "a whole number"),
    ("pop", {"max_messages": True}, "max_messages", "a number"),
    ("pop", {"max_messages": "1"}, "max_messages", "not a string"),
    ("pop", {"max_messages": None}, "max_messages", "not null"),
    ("pop", {"wait_seconds": -0.1}, "wait_seconds", "at least 0"),
    ("pop", {"wait_seconds": 30.1}, "wait_seconds", "at most 30"),
    ("pop", {"invisibility_seconds": 0.9}, "invisibility_seconds", "at least 1"),
    ("pop", {"invisibility_seconds": 43_201}, "invisibility_seconds", "at most 43200"),
    ("pop", {"attempt_id": ""}, "attempt_id", "at least 1"),
    ("pop", {"attempt_id": "a" * 129}, "attempt_id", "at most 128"),
    ("pop", {"filter": "x"}, "filter", "an object"),
    ("pop", {"filter": {"a": []}}, "filter[...]", "at least 1"),
    ("pop", {"max": 1}, "max", "max_messages"),
    ("ack", {}, "receipt_handles", "required"),
    ("ack", {"receipt_handles": []}, "receipt_handles", "at least 1"),
    ("ack", MANY_HANDLES, "receipt_handles", "at most 256"),
    ("ack", {"receipt_handles": "x"}, "receipt_handles", "a list"),
    ("ack", {"receipt_handles": [1]}, "receipt_handles[0]", "a string"),
    ("ack", {"entries": []}, "entries", "receipt_handles"),
    ("release", {"entries": []}, "entries", "at least 1"),
    ("release", {"entries": [{}]}, "entries[0].receipt_handle", "required"),
    ("release", {"entries": [{"receipt_handle": "x", "delay_seconds": -1}]}, "entries[0].delay_seconds", "at least 0"),
    ("release", {"entries": [{"receipt_handle": "x", "delay_seconds": 43_201}]}, "entries[0].delay_seconds", "43200"),
    ("release", {"entries": [{"receipt_handle": "x", "reason": "r" * 257}]}, "entries[0].reason", "at most 256"),
    ("release", {"entries": [{"receipt_handle": "x", "delay": 1}]}, "entries[0].delay", "delay_seconds"),
    ("extend", {"entries": [{"receipt_handle": "x"}]}, "entries[0].invisibility_seconds", "required"),
    (
        "extend",
        {"entries": [{"receipt_handle": "x", "invisibility_seconds": 0}]},
        "entries[0].invisibility_seconds",
        "1",
    ),
    ("extend", {"entries": [{"receipt_handle": "x", "reason": "r"}]}, "entries[0].reason", "invisibility_seconds"),
    ("reject", {"entries": [{"receipt_handle": "x", "reason": 5}]}, "entries[0].reason", "a string"),
    ("reject", {"entries": [{"receipt_handle": "x"}] * 257}, "entries", "at most 256"),
]


@pytest.mark.parametrize(("operation", "body", "field", "says"), INVALID)
def test_a_wrong_field_is_named_with_its_remedy(topic: Topic, operation: str, body: Any, field: str, says: str) -> None:
    document = problem(post(topic, operation, json.dumps(body)), 400, "invalid_request")
    assert document.get("field", "") == field
    assert says in document["detail"]


DAMAGED = [
    (b"", "it is empty"),
    (b"{", "truncated"),
    (b"not json", "not valid JSON"),
    (b'{"messages":[{"body":"x"}]} trailing', "trailing"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (b'{"messages":[{"body":"\xff"}]}', "UTF-8"),
    (b'{"messages":[{"body":"\\ud800"}]}', "surrogate"),
    (b'{"messages":[{"body":"\\ud800x"}]}', "surrogate"),
    (b'{"messages":[{"body":"\x00"}]}', "not valid JSON"),
    (b'{"messages":[{"body":"x","headers":{"a":NaN}}]}', "not valid JSON"),
    (b'{"messages":[{"body":"x","headers":{"a":Infinity}}]}', "not valid JSON"),
    (b'{"messages":[{"body":"x","headers":{"a":1e999}}]}', "out of range"),
    (b'{"messages":[{"body":"x","headers":{"a":' + b"9" * 5000 + b"}}]}", "out of range"),
    (b'{"messages":[{"body":' + b"[" * 200_000 + b"]" * 200_000 + b"}]}", "too deeply"),
    (b'{"messages":' + b'{"messages":' * 80_000, "a list"),
    (b'{"messages":' + b'{"messages":' * 200_001, "more than 200000 strings"),
]


@pytest.mark.parametrize(("body", "says"), DAMAGED, ids=lambda value: str(value)[:40])
def test_a_damaged_body_is_refused_in_words(topic: Topic, body: bytes, says: str) -> None:
    document = problem(post(topic, "publish", body), 400, "invalid_request")
    assert says in document["detail"]


def test_quotes_and_backslashes_in_a_body_are_no_repeated_names(topic: Topic) -> None:
    for body in ("\\", '"', '\\"', '{"a":1,"a":2}', "\\\\", 'x\\"y'):
        topic.publish(body, headers={'"': '\\"', "\\": body})
        assert topic.pop_one()["body"] == body


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_body_beyond_16_mib_refuses_the_request_as_a_whole_and_names_the_message(server: HttpServer) -> None:
    topic = server.topic()
    body = {"messages": [{"body": "small"}, {"body": "x" * (16 * MIB + 1)}]}
    document = problem(post(topic, "publish", json.dumps(body)), 413, "message_too_large")
    assert document["field"] == "messages[1].body"
    assert "messages[1]" in document["detail"]
    assert topic.state()["ready"] == 0


def test_the_limit_holds_for_the_decoded_bytes(server: HttpServer) -> None:
    topic = server.topic()
    encoded = "A" * ((16 * MIB + 2) // 3 * 4)  # two bytes more than 16 MiB
    document = problem(
        post(topic, "publish", json.dumps({"messages": [{"body_base64": encoded}]})), 413, "message_too_large"
    )
    assert document["field"] == "messages[0].body"


def test_headers_beyond_64_kib_are_too_large(topic: Topic) -> None:
    fits = {f"h{number:03}": "x" * 1000 for number in range(65)}
    topic.publish("x", headers=fits)
    assert topic.pop_one()["headers"] == fits
    body = {"messages": [{"body": "x", "headers": {**fits, "one": "x" * 1000}}]}
    document = problem(post(topic, "publish", json.dumps(body)), 413, "message_too_large")
    assert document["field"] == "messages[0].headers"


def test_a_request_beyond_64_mib_is_refused_before_it_is_read(server: HttpServer) -> None:
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 67108865\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_request_beyond_64_mib_is_refused(topic: Topic) -> None:
    def chunks() -> Any:
        for _ in range(65):
            yield b" " * MIB

    problem(topic.client.post(f"{topic.path}/messages", content=chunks()), 413, "message_too_large")


def test_256_entries_are_as_many_as_a_list_may_have(topic: Topic) -> None:
    assert topic.ack(*["x"] * 256) == ["invalid"] * 256


# -- names, paths, methods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "%C3%BC", "x" * 65, "a%00", "%FF", "a:b", "*"])
def test_a_name_with_other_characters_is_refused(server: HttpServer, name: str) -> None:
    client = server.client
    for response in (
        client.post(f"/v1/topics/{name}/messages", json={"messages": [{"body": "x"}]}),
        client.post(f"/v1/topics/{name}/groups/g/pop"),
        client.post(f"/v1/topics/{name}/groups/g/ack", json={"receipt_handles": ["x"]}),
        client.get(f"/v1/topics/{name}/groups/g"),
        client.put(f"/v1/admin/topics/{name}", json={"queues": 1}),
        client.get(f"/v1/admin/topics/{name}"),
        client.delete(f"/v1/admin/topics/{name}"),
    ):
        assert problem(response, 400, "invalid_request")["field"] == "topic"


def test_a_group_name_with_other_characters_is_refused(topic: Topic) -> None:
    for response in (
        topic.client.post(f"{topic.path}/groups/a b/pop"),
        topic.client.get(f"{topic.path}/groups/a b"),
        topic.client.put(f"{topic.admin_path}/groups/a b"),
        topic.client.get(f"{topic.admin_path}/groups/a b"),
        topic.client.delete(f"{topic.admin_path}/groups/a b"),
    ):
        assert problem(response, 400, "invalid_request")["field"] == "group"


def test_what_does_not_exist_is_not_found(server: HttpServer, topic: Topic) -> None:
    client = server.client
    problem(client.get("/v1/topics/absent/groups/g"), 404, "topic_not_found")
    problem(client.get(f"{topic.path}/groups/absent"), 404, "group_not_found")
    problem(client.post("/v1/topics/absent/groups/g/ack", json={"receipt_handles": ["x"]}), 404, "topic_not_found")
    problem(client.post(f"{topic.path}/groups/absent/ack", json={"receipt_handles": ["x"]}), 404, "group_not_found")
    problem(client.get("/v1/admin/topics/absent"), 404, "topic_not_found")
    problem(client.delete("/v1/admin/topics/absent"), 404, "topic_not_found")
    problem(client.put("/v1/admin/topics/absent/groups/g"), 404, "topic_not_found")
    problem(client.get(f"{topic.admin_path}/groups/absent"), 404, "group_not_found")
    problem(client.delete(f"{topic.admin_path}/groups/absent"), 404, "group_not_found")


PATHS = [
    *("/", "/v2", "/v1/", "/v1/topics", "/v1/topics/", "/v1/topics/t", "/v1/topics/t/groups", "/favicon.ico"),
    *("/v1/topics/t/groups/g/", "/v1/topics/t/groups/g/peek", "/v1/topics/t/groups/g/pop/x", "/v1/topics/t/messages/"),
    *("/v1/topics/a%2Fb/messages", "/v1/admin", "/v1/admin/topics/", "/v1/admin/topics/t/groups/"),
    *("/docs/", "/docs/..%2Fapp.py"),
]


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_path_is_not_found(server: HttpServer, path: str) -> None:
    problem(server.client.get(path), 404, "not_found")
    problem(server.client.post(path, content=b"{}"), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1", "GET"),
        ("/healthz", "GET, HEAD"),
        ("/readyz", "GET, HEAD"),
        ("/metrics", "GET"),
        ("/openapi.json", "GET, HEAD"),
        ("/docs", "GET"),
        ("/v1/topics/t/messages", "POST"),
        ("/v1/topics/t/groups/g", "GET"),
        ("/v1/topics/t/groups/g/pop", "POST"),
        ("/v1/topics/t/groups/g/ack", "POST"),
        ("/v1/topics/t/groups/g/release", "POST"),
        ("/v1/topics/t/groups/g/extend", "POST"),
        ("/v1/topics/t/groups/g/reject", "POST"),
        ("/v1/admin/topics", "GET"),
        ("/v1/admin/topics/t", "DELETE, GET, PUT"),
        ("/v1/admin/topics/t/groups/g", "DELETE, GET, PUT"),
    ],
)
def test_a_wrong_method_is_told_which_ones_there_are(server: HttpServer, path: str, allowed: str) -> None:
    for method in ("GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        if method not in allowed:
            response = server.client.request(method, path)
            problem(response, 405, "method_not_allowed")
            assert response.headers["allow"] == allowed
    if "HEAD" not in allowed:
        assert server.client.head(path).status_code == 405
    answer(server.client.get("/healthz"))  # the connection still works


def test_what_is_no_http_is_told_so(server: HttpServer) -> None:
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        received = connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_request"' in received
    assert b"popgate has failed" not in received


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_load_balancer_may_ask_by_head(server: HttpServer, path: str) -> None:
    asked, read = server.client.head(path), server.client.get(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == read.headers["content-length"]


@pytest.mark.parametrize("operation", ["publish", "pop", "ack", "release", "extend", "reject"])
def test_what_stands_in_the_query_is_refused_by_name(topic: Topic, operation: str) -> None:
    path = f"{topic.path}/messages" if operation == "publish" else f"{topic.group_path}/{operation}"
    document = problem(topic.client.post(f"{path}?max_messages=5&bogus=1"), 400, "invalid_request")
    assert document["field"] == "max_messages"
    assert "'max_messages' is in the query" in document["detail"]
    problem(topic.client.post(f"{path}?%FF"), 400, "invalid_request")


# -- content types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "application/json", "application/x-www-form-urlencoded", "text/plain", "*/*"])
def test_any_content_type_but_messagepack_is_read_as_json(topic: Topic, kind: str) -> None:
    headers = {"content_type": kind} if kind else {}
    assert answer(post(topic, "ack", b'{"receipt_handles":["x"]}', **headers)) == {"results": [{"status": "invalid"}]}
    put = topic.client.put(topic.admin_path, content=b'{"queues":1}', headers={"content-type": kind} if kind else {})
    assert put.status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_no_route_reads_json_in_another_encoding(server: HttpServer, encoding: str) -> None:
    """A purge whose body was {} in UTF-16 used to be carried out: the framework guesses the encoding."""
    content, headers = "{}".encode(encoding), {"content-type": "application/json"}
    paths = answer(server.client.get("/openapi.json"))["paths"]
    routes = [(method, path) for path in paths for method, one in paths[path].items() if "requestBody" in one]
    assert len(routes) > 20
    for method, path in routes:
        url = re.sub(r"{\w+}", "1", path)
        document = problem(server.client.request(method, url, content=content, headers=headers), 400, "invalid_request")
        assert "the body is not valid JSON" in document["detail"], (method, path)


def test_a_compressed_body_is_refused(topic: Topic) -> None:
    problem(post(topic, "ack", b"x", content_encoding="gzip"), 415, "unsupported_media_type")
    response = topic.client.put(topic.admin_path, content=b"x", headers={"content-encoding": "gzip"})
    problem(response, 415, "unsupported_media_type")


def test_another_sites_page_can_not_post_from_a_browser(topic: Topic) -> None:
    body = b'{"messages":[{"body":"x"}]}'
    response = post(topic, "publish", body, origin="https://evil.example", content_type="text/plain")
    document = problem(response, 415, "unsupported_media_type")
    assert "application/json" in document["detail"]
    for operation in ("publish", "pop"):  # a fetch() of a Blob without a type, and one without a body
        response = post(topic, operation, body if operation == "publish" else b"", origin="https://evil.example")
        problem(response, 415, "unsupported_media_type")
    answer(post(topic, "publish", body, origin="http://127.0.0.1", content_type="application/json; charset=utf-8"))


def test_a_head_as_large_as_may_be_reaches_the_owner_of_the_queue(server: HttpServer) -> None:
    topic = server.topic()
    own = len({*server.client.headers, "host", "content-type", "content-length"})
    many = {f"x-{number}": "v" for number in range(100 - own)}
    for headers in (many, {"x-long": "v" * 32_000}):
        topic.publish("x")
        response = server.client.post(f"{topic.group_path}/pop", json={"wait_seconds": 5}, headers=headers)
        assert [message["body"] for message in answer(response)["messages"]] == ["x"]
    response = server.client.post(f"{topic.group_path}/pop", json={}, headers={**many, "x-more": "v"})
    problem(response, 431, "head_too_large")
