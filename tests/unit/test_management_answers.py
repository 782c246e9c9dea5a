"""What the client of RabbitMQ's management API does with answers of a program that is not RabbitMQ."""

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from popgate.adapters.replicas import http_client
from popgate.adapters.replicas.management import Management
from popgate.domain.errors import BrokerUnavailable

PART = b" " * (64 << 10)


class Handler(BaseHTTPRequestHandler):
    """Answers each request with `answer`, or with spaces without an end if it is None."""

    answer: bytes | None = b"[]"
    encoding = ""
    head_seconds = 0.0
    """Seconds for which the head arrives byte by byte."""

    def do_GET(self) -> None:
        if self.head_seconds:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nslow: ")
        ends_at = time.monotonic() + self.head_seconds
        with contextlib.suppress(OSError):
            while time.monotonic() < ends_at:
                self.wfile.write(b"x")
                time.sleep(0.05)
        self.send_response(200)
        if self.encoding:
            self.send_header("content-encoding", self.encoding)
        self.end_headers()
        try:
            if self.answer is not None:
                self.wfile.write(self.answer)
            while self.answer is None:
                self.wfile.write(PART)
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:  # the name that the library calls
        """Log nothing."""


@pytest.fixture
def handler() -> type[Handler]:
    return type("OwnHandler", (Handler,), {})


@pytest.fixture
def url(handler: type[Handler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://u:p@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def refused(url: str, reason: str) -> None:
    management = Management([url], "/")
    with pytest.raises(BrokerUnavailable, match=reason):
        await management.queues()
    await management.close()


async def test_an_answer_of_a_common_size_is_read(url: str, handler: type[Handler]) -> None:
    handler.answer = b'[{"name": "a"}]' + PART
    management = Management([url], "/")
    assert await management.queues() == [{"name": "a"}]
    await management.close()


async def test_an_answer_without_an_end_is_refused_at_a_limit(
    url: str, handler: type[Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler.answer = None
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 10 * len(PART))
    await refused(url, "too large")


async def test_an_answer_that_takes_too_long_is_refused(
    url: str, handler: type[Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler.answer = None
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 1 << 62)
    monkeypatch.setattr(http_client, "ANSWER_SECONDS_MAX", 0.2)
    await refused(url, "not complete")


async def test_a_compressed_answer_is_refused_because_it_could_become_large(url: str, handler: type[Handler]) -> None:
    handler.answer, handler.encoding = gzip.compress(b"[" + 100 * PART + b"]"), "gzip"
    await refused(url, "compressed")


async def test_a_head_that_trickles_ends_at_last(
    url: str, handler: type[Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler.head_seconds = 3.0
    monkeypatch.setattr(http_client, "ANSWER_SECONDS_MAX", 0.3)
    await refused(url, "no answer had begun")
