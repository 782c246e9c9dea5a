"""A known head is used only for a request to which the parser would give the same meaning."""

from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.api.known_heads import HEAD_BYTES_MAX, REMEMBERED_MAX, UNCOUNTED_BYTES_MAX, KnownHeads

BODY = b'{"max_messages":1}'


def head(*lines: bytes, start: bytes = b"POST /v1/topics/t/groups/g/pop HTTP/1.1", body: bytes = BODY) -> bytes:
    return b"\r\n".join([start, b"host: localhost", b"content-length: %d" % len(body), *lines, b"", b""])


def scope_of(data: bytes) -> dict[str, Any]:
    """Return what uvicorn's parser, and so ``learn``, is told about the request in ``data``."""

    class Told:
        def __init__(self) -> None:
            self.headers: list[tuple[bytes, bytes]] = []
            self.url = b""

        def on_url(self, url: bytes) -> None:
            self.url += url

        def on_header(self, name: bytes, value: bytes) -> None:
            self.headers.append((name.lower(), value))

    told = Told()
    parser = httptools.HttpRequestParser(told)
    parser.feed_data(data)
    return {
        "http_version": parser.get_http_version(),
        "method": parser.get_method().decode(),
        "path": told.url.decode(),
        "raw_path": told.url,
        "query_string": b"",
        "headers": told.headers,
    }


def learned(data: bytes, body_bytes: int = len(BODY)) -> KnownHeads:
    heads = KnownHeads()
    heads.learn(data, scope_of(data), body_bytes)
    return heads


def test_the_next_request_with_this_head_is_known() -> None:
    heads = learned(head() + BODY)
    other = b"x" * len(BODY)
    found = heads.find(head() + other)
    assert found is not None
    known, body = found
    assert body == other
    assert (known.scope["method"], known.scope["path"]) == ("POST", "/v1/topics/t/groups/g/pop")
    assert known.headers == ((b"host", b"localhost"), (b"content-length", b"%d" % len(BODY)))


@pytest.mark.parametrize(
    "data",
    [
        head() + BODY[:-1],
        head() + BODY + b"\r\n",
        head() + BODY + b"GET / HTTP/1.1\r\n\r\n",
        (head() + BODY) * 2,
        b"\r\n" + head() + BODY,
        head() + b"\r\n" + BODY,
        head()[:-1],
        head(b"a: b") + BODY,
        head().replace(b"POST", b"GET") + BODY,
        head(body=BODY + b" ") + BODY,
        b"",
        b"\r\n\r\n",
    ],
)
def test_other_data_is_left_to_the_parser(data: bytes) -> None:
    assert learned(head() + BODY).find(data) is None


@given(st.binary(max_size=40).filter(lambda body: len(body) != len(BODY)))
def test_a_body_of_another_length_is_left_to_the_parser(body: bytes) -> None:
    assert learned(head() + BODY).find(head() + body) is None


@pytest.mark.parametrize(
    "first",
    [
        head(b"expect: 100-continue"),
        head(b"x-request-id: 1"),
        head(b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        head(b"upgrade: h2c"),
        head(b"Expect: 100-continue"),
        head(b"content-length: %d" % len(BODY)),
        head(b"transfer-encoding: chunked"),
        head(b"x: " + b"y" * HEAD_BYTES_MAX),
        head(start=b"CONNECT localhost:80 HTTP/1.1"),
    ],
)
def test_unusual_heads_are_not_learned(first: bytes) -> None:
    try:
        scope = scope_of(first)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        names = [line.split(b": ") for line in first.split(b"\r\n")[1:-2]]
        scope = {**scope_of(head() + BODY), "method": first.split(b" ")[0].decode()}
        scope["headers"] = [(name.lower(), value) for name, value in names]
    heads = KnownHeads()
    heads.learn(first + BODY, scope, len(BODY))
    assert heads.find(first + BODY) is None


def test_a_head_is_not_learned_if_the_body_had_another_length_than_announced() -> None:
    data = b"\r\n\r\n" + head() + BODY  # the parser skips empty lines before a request
    assert learned(data).find(data) is None
    behind = head() + BODY + b"\r\n"
    assert learned(behind).find(behind) is None


def test_a_large_body_is_left_to_the_parser() -> None:
    body = b"x" * (UNCOUNTED_BYTES_MAX + 1)
    data = head(body=body) + body
    assert learned(data, len(body)).find(data) is None


def test_the_oldest_head_is_forgotten() -> None:
    heads = KnownHeads()
    for number in range(REMEMBERED_MAX + 1):
        data = head(b"number: %d" % number) + BODY
        heads.learn(data, scope_of(data), len(BODY))
    assert heads.find(head(b"number: 0") + BODY) is None
    assert heads.find(head(b"number: 1") + BODY) is not None
