"""Thousands of hostile connections to one proxy with few file descriptors: other clients are served as before.

10,000 connections under 1,024 descriptors, and 2,000 that send a byte a second; the short run has a third of all.
Service is compared, round by round, with that of an unaffected proxy, so that other load on the machine affects both.
"""

import contextlib
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Self

import httpx
import psutil
import pytest

from support.processes import wait_until
from support.proxy import POPGATE, ProxyProcess, plain_client

FILES = 1_024
SHORT = 3
"""Divisor of the short run's counts."""
LATENCY_FACTOR_MAX = 2.0
LOG_BYTES_MAX = 1_000_000
MEMORY_BYTES_MAX = 64 << 20
"""Maximum growth of memory in bytes after the hostile clients have gone."""
ROUNDS = 40
BURST_MAX, AGAIN_MAX = 2_000, 100
"""Connections opened a second: at first, and to replace closed ones."""
Told = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """This process holds the other ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def started(folder: Path, files: int) -> Generator[ProxyProcess]:
    program = ("prlimit", f"--nofile={files}:{files}", "--", *POPGATE)
    with ProxyProcess(folder, program=program) as process:
        process.client.put("/v1/admin/topics/t", json={"queues": 1})
        process.client.put("/v1/admin/topics/t/groups/default")
        yield process


@pytest.fixture
def proxy(tmp_path: Path, full_run: bool) -> Iterator[ProxyProcess]:
    with started(tmp_path / "proxy", FILES if full_run else FILES // SHORT) as process:
        yield process


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy without hostile clients."""
    with started(tmp_path / "twin", FILES) as process:
        yield process


def round_seconds(client: httpx.Client) -> float:
    """Return the seconds to publish a message, pop it and ack it."""
    began = time.perf_counter()
    for path, body in (
        ("/v1/topics/t/messages", {"messages": [{"body": "x"}]}),
        ("/v1/topics/t/groups/default/pop", {"wait_seconds": 10}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    handle = answer.json()["messages"][0]["receipt_handle"]
    acked = client.post("/v1/topics/t/groups/default/ack", json={"receipt_handles": [handle]}).json()
    assert acked["results"] == [{"status": "acked"}]
    return time.perf_counter() - began


def service(*proxies: ProxyProcess) -> list[float]:
    """Return the median round of each proxy, by a client that keeps its connection, while other clients connect for
    one request each.
    """
    times: list[list[float]] = [[] for _ in proxies]
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(plain_client(one.url, timeout_seconds=20)) for one in proxies]
        for number in range(ROUNDS):
            for mine, client in zip(times, kept, strict=True):
                mine.append(round_seconds(client))
            if number % 10 == 0:
                for one in proxies:
                    wait_until(partial(is_open_to_new, one), timeout_seconds=2, what="a newcomer to be served")
    return [statistics.median(mine) for mine in times]


def is_open_to_new(proxy: ProxyProcess) -> bool:
    with plain_client(proxy.url, timeout_seconds=5) as new:
        try:
            return new.get("/readyz").status_code == 200
        except httpx.NetworkError:  # it was closed to make room, because hundreds arrived at once
            return False


class Hostile:
    """Connections of one kind: each new one sends ``greeting``, and then one ``drop`` a second."""

    def __init__(self, port: int, count: int, greeting: bytes, drop: bytes) -> None:
        self._port = port
        self._count = count
        self._greeting = greeting
        self._drop = drop
        self._open: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.opened = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for one in self._open:
            one.close()

    def _run(self) -> None:
        """Open ``count`` of them, and replace some of those that the proxy has closed."""
        while not self._stop.is_set():
            began = time.monotonic()
            self._open = [one for one in self._open if self._goes_on(one)]
            burst = AGAIN_MAX if self.opened >= self._count else BURST_MAX
            for _ in range(min(burst, self._count - len(self._open))):
                with contextlib.suppress(OSError):
                    self._open.append(self._new())
                    self.opened += 1
            self._stop.wait(max(0.0, 1.0 - (time.monotonic() - began)))

    def _new(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=2)
        connection.setblocking(False)
        if self._greeting:
            connection.send(self._greeting)
        return connection

    def _goes_on(self, connection: socket.socket) -> bool:
        try:
            if self._drop:
                connection.send(self._drop)
            if connection.recv(1_000):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        connection.close()
        return False


KINDS = {
    "silent": (10_000, b"", b""),
    "slow heads": (2_000, b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\nx: ", b"x"),
    "slow bodies": (
        2_000,
        b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000000\r\n\r\n{",
        b" ",
    ),
}


@pytest.mark.quiet
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_connections_do_not_hold_up_the_others(
    proxy: ProxyProcess, twin: ProxyProcess, kind: str, record_property: Told, full_run: bool
) -> None:
    count, greeting, drop = KINDS[kind]
    count = count if full_run else count // SHORT
    process = psutil.Process(proxy.pid)
    service(proxy, twin)
    memory = process.memory_info().rss
    with Hostile(proxy.port, count, greeting, drop) as hostile:
        wait_until(lambda: hostile.opened >= count, timeout_seconds=60, what="the hostile clients")
        during, usual = service(proxy, twin)
        peak = process.memory_info().rss
    wait_until(lambda: len(process.net_connections()) < 10, timeout_seconds=20, what="them to be gone")
    after = process.memory_info().rss
    record_property(
        "told",
        f"{hostile.opened} {kind}: a round takes {1000 * during:.1f} ms, and {1000 * usual:.1f} ms at a proxy that is "
        f"left alone ({during / usual:.2f} times); memory {memory >> 20}, {peak >> 20} and then {after >> 20} MiB; "
        f"log {len(proxy.output)} bytes",
    )
    assert during < LATENCY_FACTOR_MAX * usual
    assert len(proxy.output) < LOG_BYTES_MAX
    assert after - memory < MEMORY_BYTES_MAX
