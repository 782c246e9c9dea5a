"""Limits on a client's use of the HTTP interface, over raw sockets: each has an answer that names it."""

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from popgate.api.connection_limiter import FAREWELL_SECONDS, NEW_SECONDS
from popgate.api.joined_writes import GOODBYE_SECONDS
from popgate.api.protocol import FAREWELL_BYTES_MAX
from support.key_files import Key, KeyFile, everything
from support.processes import wait_until
from support.proxy import POPGATE, ProxyProcess

MIB = 1 << 20
HEAD_SECONDS = 1.0
IDLE_SECONDS = 2.0
BODIES_BYTES_MAX = 64 * MIB
SETTINGS = (
    *("--head-seconds", str(HEAD_SECONDS), "--connection-idle-seconds", str(IDLE_SECONDS)),
    *("--bodies-bytes-max", str(BODIES_BYTES_MAX), "--body-bytes-per-second-min", "100000"),
    *("--parked-pops-max", "6", "--parked-pops-per-group-max", "4"),
)
PUBLISH = "/v1/topics/t/messages"
POP = "/v1/topics/t/groups/default/pop"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("limits"), *SETTINGS) as process:
        yield process


@contextlib.contextmanager
def connected(proxy: ProxyProcess) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=15) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and body of the next answer, which is JSON."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = connection.recv(1)
        assert more, f"the connection ended after {head!r}"
        head += more
    first, *lines = head.decode().split("\r\n")[:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(first.split()[1]), headers, json.loads(body)


def refused(connection: socket.socket) -> tuple[int, str]:
    """Return the status and the code of a refusal, after which the connection ends."""
    status, headers, document = read_answer(connection)
    assert (headers["connection"], headers["content-type"]) == ("close", "application/problem+json")
    assert document["status"] == status
    if status in (429, 503):
        assert int(headers["retry-after"]) >= 1
    assert connection.recv(1) == b""
    return status, document["code"]


def head_of(*headers: str, path: str = "/v1", length: int | None = None) -> bytes:
    lines = [f"GET {path} HTTP/1.1" if length is None else f"POST {path} HTTP/1.1", "host: localhost", *headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def is_served(proxy: ProxyProcess) -> bool:
    """Tell whether a client with a separate connection soon gets its answer."""
    with connected(proxy) as connection:
        connection.settimeout(2)
        connection.sendall(head_of())
        return read_answer(connection)[0] == 200


def test_open_connections_are_counted_in_the_metrics(proxy: ProxyProcess) -> None:
    def count() -> float:
        (line,) = [one for one in proxy.client.get("/metrics").text.splitlines() if one.startswith("popgate_http_conn")]
        return float(line.rpartition(" ")[2])

    wait_until(lambda: count() == 1, timeout_seconds=5, what="the connections of earlier tests to end")
    with connected(proxy), connected(proxy):
        wait_until(lambda: count() == 3, timeout_seconds=1, what="two more connections")
    wait_until(lambda: count() == 1, timeout_seconds=5, what="these connections to end")


# ---------------------------------------------------------------- what is no plain request

OFFERS = (("connection: Upgrade, HTTP2-Settings", "upgrade: h2c"), ("connection: upgrade", "upgrade: websocket"))


@pytest.mark.parametrize("piece", [100_000, 1])
@pytest.mark.parametrize("offer", OFFERS)
def test_the_body_behind_the_offer_of_another_protocol_is_the_body(
    proxy: ProxyProcess, offer: tuple[str, str], piece: int
) -> None:
    """Java's client offers HTTP/2 with each request; and a body must never be interpreted as the next request."""
    hidden = head_of(path="/v1/hidden")
    body = b'{"attempt_id": 7}' + hidden
    sent = head_of(*offer, path=POP, length=len(body)) + body + head_of(*offer) + head_of(path="/healthz")
    with connected(proxy) as connection:
        for start in range(0, len(sent), piece):
            connection.sendall(sent[start : start + piece])
        status, _, document = read_answer(connection)
        assert (status, document["code"]) == (400, "invalid_request")
        assert "is empty" not in document["detail"]
        assert read_answer(connection)[0] == 200
        assert read_answer(connection)[2] == {"status": "ok"}


def test_the_offer_of_another_protocol_on_a_connection_that_ends_is_answered(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        connection.settimeout(5)
        connection.sendall(head_of("upgrade: h2c", "connection: upgrade", "connection: close"))
        assert read_answer(connection)[0] == 200
        assert connection.recv(1) == b""


CHUNKED = b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
TRAILERS = 200_000


def test_fields_behind_a_chunked_body_are_ignored(proxy: ProxyProcess) -> None:
    body = b'{"messages": [{"body": "x"}]}'
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    with connected(proxy) as connection:
        connection.sendall(
            CHUNKED + chunks + b"content-encoding: gzip\r\norigin: http://evil\r\nhost: evil\r\n\r\n" + head_of()
        )
        status, _, document = read_answer(connection)
        assert (status, document["results"][0]["status"]) == (200, "published")
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("path", ["/v1/topics/t/messages", "/nowhere"])
def test_endless_fields_behind_a_body_cost_no_memory_and_end_the_connection(proxy: ProxyProcess, path: str) -> None:
    process, received = psutil.Process(proxy.pid), b""
    before = process.memory_info().rss
    with connected(proxy) as connection:
        connection.settimeout(10)
        connection.sendall(CHUNKED.replace(b"/v1/topics/t/messages", path.encode()) + b"0\r\n")
        with contextlib.suppress(OSError):
            connection.sendall(b"a: b\r\n" * TRAILERS)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                received += part
    assert received.startswith(b"HTTP/1.1 431 ")
    assert process.memory_info().rss - before < 8 << 20
    assert "Traceback" not in proxy.output


def test_a_body_of_tiny_chunks_is_refused(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        connection.sendall(CHUNKED + b"1\r\n \r\n" * 2_000)
        assert refused(connection) == (400, "invalid_request")


def test_a_length_of_thousands_of_digits_is_refused(proxy: ProxyProcess) -> None:
    head = b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: %b9\r\n\r\n"
    with connected(proxy) as connection:
        connection.sendall(head % (b"0" * 6_000))
        status, _, document = read_answer(connection)
        assert (status, document["code"]) == (413, "message_too_large")
        connection.sendall(b"{}       ")
        connection.sendall(head_of(path="/healthz"))
        assert read_answer(connection)[0] == 200
    assert "Traceback" not in proxy.output


REQUESTS_AHEAD = 200_000


def test_requests_sent_ahead_take_no_memory(proxy: ProxyProcess) -> None:
    """Parsed waiting requests would take kilobytes each; so they wait as bytes, most of them in the kernel."""
    before = psutil.Process(proxy.pid).memory_info().rss
    requests = memoryview(head_of() * REQUESTS_AHEAD)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(proxy)) for _ in range(5)]
        sent = [0] * len(connections)
        for connection in connections:
            connection.setblocking(False)
        ends_at = time.monotonic() + IDLE_SECONDS
        while time.monotonic() < ends_at:
            for number, connection in enumerate(connections):
                with contextlib.suppress(OSError):  # full, or given up
                    sent[number] += connection.send(requests[sent[number] : sent[number] + 65_536])
            assert psutil.Process(proxy.pid).memory_info().rss < before + 40 * MIB
    assert is_served(proxy)


@pytest.mark.parametrize("piece", [1 << 20, 700])
def test_requests_sent_ahead_are_answered_in_order(proxy: ProxyProcess, piece: int) -> None:
    sent, expected = b"", list[int]()
    for number in range(300):
        body = b'{"messages": "%s"}' % (b"x" * (number * 37 % 3_000))
        publish = head_of(path=PUBLISH, length=len(body)) + body
        sent += (head_of(path="/healthz"), publish, head_of(path="/x"))[number % 3]
        expected.append((200, 400, 404)[number % 3])
    with connected(proxy) as connection:

        def send() -> None:
            for start in range(0, len(sent), piece):
                connection.sendall(sent[start : start + piece])

        sender = threading.Thread(target=send)
        sender.start()
        assert [read_answer(connection)[0] for _ in expected] == expected
        sender.join()


@pytest.mark.parametrize("line", ["CONNECT localhost:80 HTTP/1.1", "GET http://localhost:x/ HTTP/1.1"])
def test_a_request_that_names_no_path_is_answered(proxy: ProxyProcess, line: str) -> None:
    with connected(proxy) as connection:
        connection.sendall(f"{line}\r\nhost: localhost\r\n\r\n".encode())
        assert refused(connection) == (400, "invalid_request")
    assert is_served(proxy)


# ---------------------------------------------------------------- heads

LONG_HEADERS = [f"x-{number}: {'v' * 1_000}" for number in range(40)]
MANY_HEADERS = [f"x-{number}: v" for number in range(100)]
LONG_PATH = "/v1?" + "p" * 8_192


@pytest.mark.parametrize("piece", [100_000, 1_000])
@pytest.mark.parametrize("before", [b"", head_of()])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (head_of(*LONG_HEADERS), 431),
        (head_of(*LONG_HEADERS)[:-2], 431),
        (head_of(*MANY_HEADERS), 431),
        (head_of(path=LONG_PATH), 414),
        (head_of(path="/" + "p" * 40_000), 414),
        (b"\r\n" * 40_000, 431),
        (head_of()[:-2] + b"a:\r\n" * 7_000, 431),
    ],
    ids=[
        "long headers",
        "long headers without an end",
        "many headers",
        "long path",
        "very long path",
        "empty lines",
        "many headers without an end",
    ],
)
def test_a_head_that_is_too_large_is_refused(
    proxy: ProxyProcess, head: bytes, status: int, piece: int, before: bytes
) -> None:
    with connected(proxy) as connection:
        if before:
            connection.sendall(before)
            assert read_answer(connection)[0] == 200
        for start in range(0, len(head), piece):
            connection.sendall(head[start : start + piece])
        assert refused(connection) == (status, "head_too_large")


def test_heads_up_to_the_limits_are_read(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        for head in (
            head_of(*LONG_HEADERS[:30]),
            head_of(*MANY_HEADERS[:99]),
            head_of(path=LONG_PATH[:8_192]),
        ):
            connection.sendall(head)
            assert read_answer(connection)[0] == 200
        connection.sendall(head_of(*LONG_HEADERS[:30]) * 5)  # in few reads
        assert [read_answer(connection)[0] for _ in range(5)] == [200] * 5
        body = json.dumps({"messages": [{"body": "x" * 300_000}]}).encode()
        connection.sendall((head_of(path=PUBLISH, length=len(body)) + body) * 3)
        assert [read_answer(connection)[0] for _ in range(3)] == [200] * 3


def test_150_mib_of_headers_take_no_memory(proxy: ProxyProcess) -> None:
    before = psutil.Process(proxy.pid).memory_info().rss
    with connected(proxy) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head_of()[:-2])
        for number in range(150):
            connection.sendall(b"x-%d: " % number + b"v" * MIB + b"\r\n")
    assert psutil.Process(proxy.pid).memory_info().rss - before < 20 * MIB
    assert is_served(proxy)


@pytest.mark.parametrize("before", [b"", head_of()])
def test_a_head_that_comes_byte_by_byte_has_a_time_limit(proxy: ProxyProcess, before: bytes) -> None:
    with connected(proxy) as connection:
        if before:
            connection.sendall(before)
            assert read_answer(connection)[0] == 200
        began = time.monotonic()
        connection.settimeout(0.1)
        for byte in head_of("x: " + "v" * 1_000):
            connection.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                connection.recv(1, socket.MSG_PEEK)
                break
        assert HEAD_SECONDS <= time.monotonic() - began < HEAD_SECONDS + 2
        connection.settimeout(5)
        assert refused(connection) == (408, "request_timeout")


@pytest.mark.parametrize("said", [b"", head_of()])
def test_an_idle_connection_is_closed(proxy: ProxyProcess, said: bytes) -> None:
    began = time.monotonic()
    with connected(proxy) as connection:
        if said:
            connection.sendall(said)
            assert read_answer(connection)[0] == 200
        assert connection.recv(1) == b""
        assert IDLE_SECONDS <= time.monotonic() - began < IDLE_SECONDS + 2


# ---------------------------------------------------------------- bodies


def test_a_body_that_comes_too_slowly_is_given_up(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        connection.sendall(head_of(path=PUBLISH, length=MIB))
        began = time.monotonic()
        connection.settimeout(0.05)
        while True:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                connection.recv(1, socket.MSG_PEEK)
                break
        assert HEAD_SECONDS <= time.monotonic() - began < HEAD_SECONDS + 2
        connection.settimeout(5)
        assert refused(connection) == (408, "request_timeout")


def test_an_incomplete_body_behind_a_request_that_waits_has_a_time_limit_too(proxy: ProxyProcess) -> None:
    body = b'{"wait_seconds":1}' + b" " * 3_000
    with connected(proxy) as connection:
        connection.sendall(head_of(path=POP, length=len(body)) + body[:1_000])
        time.sleep(0.2)
        connection.sendall(body[1_000:])
        time.sleep(0.2)
        connection.sendall(head_of(path=PUBLISH, length=100) + b"{")
        assert read_answer(connection)[0] == 200
        connection.settimeout(HEAD_SECONDS + 5)
        assert refused(connection) == (408, "request_timeout")


def test_what_still_comes_after_an_answer_has_a_time_limit_too(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        connection.sendall(head_of(path=PUBLISH, length=65 * MIB))
        assert read_answer(connection)[0] == 413
        assert connection.recv(1) == b""


REFUSED_EARLY = head_of(path=PUBLISH, length=65 * MIB)
"""A request that is answered with 413 before its body arrives."""


@pytest.mark.parametrize("part_bytes", [20_000, FAREWELL_BYTES_MAX // 4], ids=["slow", "fast"])
def test_a_body_that_goes_on_after_the_answer_ends_the_connection(proxy: ProxyProcess, part_bytes: int) -> None:
    """It arrives fast enough for a body that is wanted."""
    with connected(proxy) as connection:
        if part_bytes == 20_000:  # so small that the answer does not end the connection
            zeros = b"content-length: 000000000000000000000"
            connection.sendall(head_of(path=PUBLISH, length=1_000_000).replace(b"content-length: ", zeros))
        else:
            connection.sendall(REFUSED_EARLY)
        assert read_answer(connection)[0] == 413
        began = time.monotonic()
        connection.settimeout(0.1)
        received: bytes | None = None
        while received is None and time.monotonic() - began < FAREWELL_SECONDS + 2:
            connection.sendall(b"x" * part_bytes)
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1)
        assert received == b""
        if part_bytes == 20_000:
            assert time.monotonic() - began >= FAREWELL_SECONDS
        else:
            assert time.monotonic() - began < FAREWELL_SECONDS / 2
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < FAREWELL_SECONDS + GOODBYE_SECONDS + 3:
                connection.sendall(b"x" * part_bytes)
                time.sleep(0.05)
            pytest.fail("the connection stays")


CHUNKED_EARLY = CHUNKED.replace(b"host:", b"content-encoding: gzip\r\nhost:")
"""A request that is answered with 415 before its body arrives."""


@pytest.mark.parametrize("request_head", [REFUSED_EARLY, CHUNKED_EARLY], ids=["large", "of unknown length"])
def test_an_early_answer_says_that_its_connection_ends(proxy: ProxyProcess, request_head: bytes) -> None:
    """Otherwise a proxy in front would send the request of another client on this connection."""
    with connected(proxy) as connection:
        connection.sendall(request_head)
        status, headers, _ = read_answer(connection)
        assert (status in (413, 415), headers["connection"]) == (True, "close")
        assert connection.recv(1) == b""


def test_a_malformed_request_changes_nothing(proxy: ProxyProcess) -> None:
    topic = "/v1/admin/topics/kept"
    assert proxy.client.put(topic, json={"queues": 1}).is_success
    for rest in (b"transfer-encoding: chunked\r\n\r\nZZ\r\n", b"transfer-encoding: xchunked\r\n\r\n"):
        with connected(proxy) as connection:
            connection.sendall(f"DELETE {topic} HTTP/1.1\r\nhost: localhost\r\n".encode() + rest)
            assert refused(connection) == (400, "invalid_request")
        assert proxy.client.get(topic).is_success
    assert proxy.client.delete(topic).is_success


def test_a_small_body_that_arrives_after_the_answer_keeps_the_connection(proxy: ProxyProcess) -> None:
    head = b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: %b10000\r\n\r\n" % (b"0" * 20)
    with connected(proxy) as connection:
        for _ in range(2):
            connection.sendall(head)
            assert read_answer(connection)[0] == 413
            connection.sendall(b"x" * 10_000 + head_of())
            assert read_answer(connection)[0] == 200
        connection.sendall(head)
        assert read_answer(connection)[0] == 413
        connection.sendall(b"x" * 10_000)
        began = time.monotonic()
        assert connection.recv(1) == b"", "then it is idle, and closed as such"
        assert IDLE_SECONDS <= time.monotonic() - began < IDLE_SECONDS + 2


@pytest.mark.parametrize("headers", [{}, {"connection": "close"}], ids=["keep-alive", "close"])
def test_a_client_that_sends_its_whole_body_first_reads_the_early_answer(
    proxy: ProxyProcess, headers: dict[str, str]
) -> None:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=15)
    with contextlib.closing(client):
        client.request("POST", PUBLISH, b"x" * (65 * MIB), headers)
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["code"]) == (413, "message_too_large")


def test_a_body_at_a_good_rate_may_take_longer_than_a_head(proxy: ProxyProcess) -> None:
    body = json.dumps({"messages": [{"body": "x" * 800_000}]}).encode()
    with connected(proxy) as connection:
        connection.sendall(head_of(path=PUBLISH, length=len(body)))
        for start in range(0, len(body), 50_000):
            connection.sendall(body[start : start + 50_000])
            time.sleep(HEAD_SECONDS / 8)
        assert read_answer(connection)[0] == 200


def test_unfinished_bodies_give_way_where_they_take_too_much_memory(proxy: ProxyProcess) -> None:
    """The proxy refuses those that have held most for longest, so that a client that sends at once is always served."""
    whole = json.dumps({"messages": [{"body": "x" * (15 * MIB)}]}).encode()
    before = psutil.Process(proxy.pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(proxy)) for _ in range(3)]
        for connection in slow:
            connection.sendall(head_of(path=PUBLISH, length=59 * MIB))
            connection.sendall(b"x" * (40 * MIB))
        assert refused(slow[0]) == (503, "overloaded")
        assert refused(slow[1]) == (503, "overloaded")
        quick = stack.enter_context(connected(proxy))
        for _ in range(2):
            quick.sendall(head_of(path=PUBLISH, length=len(whole)) + whole)
            status, _, document = read_answer(quick)
            assert status == 200, document
        slow[2].sendall(b"x" * (18 * MIB))
        while not select.select([slow[2]], [], [], 0)[0]:  # data it has sent may still be on its way
            quick.sendall(head_of(path=PUBLISH, length=len(whole)) + whole)
            status, _, document = read_answer(quick)
            assert status == 200, document
        assert refused(slow[2]) == (503, "overloaded")
        assert psutil.Process(proxy.pid).memory_info().rss - before < 3 * BODIES_BYTES_MAX
    assert "memory" in proxy.output


def test_requests_that_wait_do_not_keep_large_bodies_of_others_out(tmp_path: Path) -> None:
    """Neither do bytes that a client has sent behind such a request."""
    keys = KeyFile(tmp_path / "keys.toml")
    others, mine = keys.principal("others", everything()), keys.principal("mine", everything())

    def post(path: str, key: Key, body: bytes) -> bytes:
        return head_of(f"authorization: {key.headers['authorization']}", path=path, length=len(body)) + body

    whole = json.dumps({"messages": [{"body": "x" * (2 * MIB)}]}).encode()
    limit = ("--bodies-bytes-max", str(BODIES_BYTES_MAX), "--keys-file", str(keys.path), "--auto-create", "true")
    with ProxyProcess(tmp_path / "proxy", *limit) as proxy, contextlib.ExitStack() as stack:
        before = psutil.Process(proxy.pid).memory_info().rss
        waiting = [stack.enter_context(connected(proxy)) for _ in range(400)]
        pop = post("/v1/topics/t/groups/default/pop", others, b'{"wait_seconds":30' + b" " * 200_000 + b"}")
        for part in (pop[:-100], pop[-100:], pop):
            for connection in waiting:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(part)
        assert psutil.Process(proxy.pid).memory_info().rss - before < 2 * BODIES_BYTES_MAX
        upload = stack.enter_context(connected(proxy))
        for _ in range(5):
            upload.sendall(post(PUBLISH, mine, whole))
            assert read_answer(upload)[0] == 200


def test_bodies_whose_clients_leave_before_the_answer_do_not_count_any_more(proxy: ProxyProcess) -> None:
    whole = json.dumps({"messages": [{"body": "x" * (15 * MIB)}]}).encode()
    request = head_of(path=PUBLISH, length=len(whole)) + whole
    for _ in range(2 * BODIES_BYTES_MAX // len(whole)):
        with connected(proxy) as connection:
            connection.sendall(request)

    def has_room() -> bool:
        """A slow disk may still be storing the last ones, whose memory counts until then."""
        with connected(proxy) as connection:
            connection.sendall(request)
            return read_answer(connection)[0] == 200

    wait_until(has_room, timeout_seconds=10, what="the bodies of clients that have left to be forgotten")


# ---------------------------------------------------------------- pops


def test_pops_that_wait_have_limits_of_the_group_and_of_the_proxy(proxy: ProxyProcess) -> None:
    def pop(stack: contextlib.ExitStack, group: str, *, wait_seconds: float = 20) -> socket.socket:
        connection = stack.enter_context(connected(proxy))
        body = b'{"wait_seconds":%f}' % wait_seconds
        connection.sendall(head_of(path=f"/v1/topics/waited/groups/{group}/pop", length=len(body)) + body)
        return connection

    def parked() -> float:
        lines = proxy.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("popgate_parked_pops{"))

    proxy.client.put("/v1/admin/topics/waited", json={"queues": 1})
    with contextlib.ExitStack() as stack:
        for group, count in (("a", 4), ("b", 2)):
            for _ in range(count):
                pop(stack, group)
            wait_until(lambda: parked() >= 4, timeout_seconds=5, what="parked pops")
            status, headers, document = read_answer(pop(stack, group if group == "a" else "c"))
            assert (status, document["code"]) == (429, "too_many_pops")
            assert int(headers["retry-after"]) >= 1
            assert ("group" if group == "a" else "proxy") in document["detail"]
        assert read_answer(pop(stack, "a", wait_seconds=0))[0] == 200  # requests that need no wait are served
    wait_until(lambda: parked() == 0, timeout_seconds=5, what="the pops to leave with their clients")
    with contextlib.ExitStack() as stack:
        assert read_answer(pop(stack, "a", wait_seconds=0.2))[0] == 200


def test_an_answer_that_is_not_taken_is_given_up_and_its_leases_with_it(proxy: ProxyProcess) -> None:
    # One message only: a pop that comes between two deliveries takes the first and leaves the second to the next.
    proxy.client.post("/v1/topics/unread/messages", json={"messages": [{"body": "x" * (15 * MIB)}]})
    with connected(proxy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        body = b'{"max_messages":1,"wait_seconds":2,"invisibility_seconds":600}'
        path = "/v1/topics/unread/groups/default/pop"
        connection.sendall(head_of(path=path, length=len(body)) + body)
        connection.recv(1_000)
        again = proxy.client.post(path, json={"max_messages": 2, "wait_seconds": 20}).json()["messages"]
    assert {message["delivery_count"] for message in again} == {2}


def test_the_next_request_is_served_when_the_answer_to_the_earlier_one_was_read(proxy: ProxyProcess) -> None:
    """Otherwise a connection could have a second answer in memory, which no limit counts."""
    proxy.client.post("/v1/topics/two/messages", json={"messages": [{"body": "x" * (15 * MIB)}]})
    proxy.client.post("/v1/topics/two/messages", json={"messages": [{"body": "x" * (15 * MIB)}]})
    with connected(proxy) as connection:
        body = b'{"max_messages":1,"wait_seconds":2,"invisibility_seconds":600}'
        request = head_of(path="/v1/topics/two/groups/default/pop", length=len(body)) + body
        connection.sendall(request)
        connection.recv(1_000)
        connection.sendall(request)
        time.sleep(1)
        assert proxy.client.get("/v1/topics/two/groups/default").json()["in_flight"] == 1
        answers, ends = b"", 0
        while ends < 2:
            part = connection.recv(1 << 20)
            assert part, "the server closed the connection"
            answers = answers[-30:] + part
            ends += answers.count(b'"invisible_until"', max(0, len(answers) - len(part) - 16))
    assert is_served(proxy)


# ---------------------------------------------------------------- connections


@contextlib.contextmanager
def small_proxy(folder: Path, *, files: int) -> Generator[ProxyProcess]:
    """A proxy limited to this many open ``files``: three quarters of them are for clients, which may be slow."""
    program = ("prlimit", f"--nofile={files}:{files}", "--", *POPGATE)
    with ProxyProcess(folder, "--head-seconds", "600", "--body-bytes-per-second-min", "1", program=program) as proxy:
        yield proxy


def test_connections_that_wait_for_their_clients_make_room(tmp_path: Path) -> None:
    with small_proxy(tmp_path, files=160) as proxy, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(proxy)) for _ in range(100)]
        for connection in silent[::2]:
            connection.sendall(b"GET /v1 HT")
        kept = stack.enter_context(connected(proxy))
        for _ in range(200):
            stack.enter_context(connected(proxy))
            if _ % 20 == 0:
                kept.sendall(head_of())
                assert read_answer(kept)[0] == 200
                assert is_served(proxy)
        assert silent[0].recv(1) == silent[1].recv(1) == b""
        assert proxy.output.count("closed") == 1  # and not one line for each


def test_answered_connections_whose_bodies_go_on_keep_nobody_out(tmp_path: Path) -> None:
    with small_proxy(tmp_path, files=160) as proxy, contextlib.ExitStack() as stack:
        time.sleep(2 * NEW_SECONDS)
        kept = stack.enter_context(connected(proxy))
        kept.sendall(head_of())
        assert read_answer(kept)[0] == 200
        time.sleep(2 * NEW_SECONDS)
        for _ in range(150):
            connection = stack.enter_context(connected(proxy))
            connection.sendall(REFUSED_EARLY + b"x" * 2_000)
            assert read_answer(connection)[0] == 413
        for _ in range(20):
            assert is_served(proxy)
        kept.sendall(head_of())
        assert read_answer(kept)[0] == 200, "an idle connection is closed after the answered ones"


def test_where_all_connections_are_busy_newcomers_are_told_so(tmp_path: Path) -> None:
    with small_proxy(tmp_path, files=160) as proxy:
        with contextlib.ExitStack() as stack:
            time.sleep(2 * NEW_SECONDS)  # the connection of the readiness check is the first to be closed
            busy: list[socket.socket] = []
            for _ in range(120):
                busy.append(stack.enter_context(connected(proxy)))
                busy[-1].sendall(head_of("expect: 100-continue", path=PUBLISH, length=1_000))
                assert busy[-1].recv(100).startswith(b"HTTP/1.1 100 ")
            assert refused(stack.enter_context(connected(proxy))) == (503, "overloaded")
            for _ in range(300):  # above a limit they wait until they are accepted
                stack.enter_context(connected(proxy))
            time.sleep(0.5)
            assert psutil.Process(proxy.pid).num_fds() < 160
            body = b'{"messages":[]}'
            busy[0].sendall(b" " * (1_000 - len(body)) + body)
            assert read_answer(busy[0])[0] == 400
        wait_until(lambda: is_served(proxy), timeout_seconds=5, what="room again")
        assert len(proxy.output) < 5_000
