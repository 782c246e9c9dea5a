"""A request whose head is known gets the same answer as one that is parsed, over raw sockets."""

import contextlib
import json
import socket
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support.proxy import ProxyProcess

PUBLISH, POP = "/v1/topics/t/messages", "/v1/topics/t/groups/default/pop"
ONE_MESSAGE = json.dumps({"messages": [{"body": "x"}]})
TIMES = 4
"""The head of the first of equal requests is learned, and those of the others are known."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("heads")) as process:
        yield process


@contextlib.contextmanager
def connected(proxy: ProxyProcess) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=15) as connection:
        yield connection


def request(path: str, body: str, *lines: str, method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines, "", body]
    return "\r\n".join(head).encode()


def read_answer(connection: socket.socket) -> tuple[str, bytes]:
    """Return the status line and the body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = connection.recv(1)
        assert more, f"the connection ended after {head!r}"
        head += more
    first, *lines = head.decode().lower().split("\r\n")[:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    length = int(headers["content-length"])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    del headers["date"]
    return f"{first} {headers}", body


@pytest.mark.parametrize(
    ("path", "body", "lines"),
    [
        (POP, '{"max_messages": 2}', ()),
        (POP, '{"max_messages": 2}', ("Accept: application/msgpack",)),
        (POP, '{"max_messages": "two"}', ()),
        (POP, "", ()),
        (POP, '{"max_messages": 1', ()),
        (f"{POP}?wait=1", "{}", ()),
        (f"{POP}/nowhere", "{}", ()),
        (POP, "{}", ("Content-Encoding: gzip",)),
        (POP, "{}", ("Origin: http://elsewhere.example", "Content-Type: text/plain")),
        ("/v1/admin/topics/t", '{"queues": 1}', ()),
        (POP.replace("/t/", "/%74/"), "{}", ()),
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
def test_equal_requests_have_equal_answers(
    proxy: ProxyProcess, path: str, body: str, lines: tuple[str, ...], method: str
) -> None:
    proxy.client.post(PUBLISH, json={"messages": [{"body": "x"}]}).raise_for_status()
    while proxy.client.post(POP, json={"max_messages": 256}).json()["messages"]:
        pass
    with connected(proxy) as connection:
        answers: list[tuple[str, bytes]] = []
        for _ in range(TIMES):
            connection.sendall(request(path, body, *lines, method=method))
            answers.append(read_answer(connection))
    assert answers == [answers[0]] * TIMES


def test_each_request_gets_its_own_body(proxy: ProxyProcess) -> None:
    with connected(proxy) as connection:
        for number in range(8):
            body = json.dumps({"messages": [{"body": "own", "message_id": f"m{number}"}]})
            connection.sendall(request(PUBLISH, body))
            _, answer = read_answer(connection)
            assert json.loads(answer)["results"] == [{"status": "published", "message_id": f"m{number}"}]


def test_known_requests_may_arrive_in_parts_or_together(proxy: ProxyProcess) -> None:
    pop = request(POP.replace("default", "parts"), "{}")
    empty = '{"messages":[]}'
    with connected(proxy) as connection:
        for _ in range(TIMES):
            connection.sendall(pop)
            assert read_answer(connection)[1].decode() == empty
        for cut in range(1, len(pop), 7):
            connection.sendall(pop[:cut])
            time.sleep(0.005)
            connection.sendall(pop[cut:])
            assert read_answer(connection)[1].decode() == empty
        for count in (2, 3, 20):
            connection.sendall(pop * count)
            assert [read_answer(connection)[1].decode() for _ in range(count)] == [empty] * count
        connection.sendall(b"\r\n" + pop + b"\r\n")
        assert read_answer(connection)[1].decode() == empty
        connection.sendall(pop)
        assert read_answer(connection)[1].decode() == empty


def test_a_known_request_behind_a_parked_pop_waits_for_its_turn(proxy: ProxyProcess) -> None:
    group = POP.replace("default", "turns")
    publish = request(PUBLISH, ONE_MESSAGE)
    waiting = request(group, '{"wait_seconds": 20}')
    with connected(proxy) as connection, connected(proxy) as publisher:
        connection.sendall(request(group, "{}"))
        read_answer(connection)
        for _ in range(2):
            connection.sendall(waiting)
            time.sleep(0.2)
            connection.sendall(publish)  # its head is known, but the pop before it has not been answered
            time.sleep(0.2)
            publisher.sendall(publish)
            read_answer(publisher)
            assert len(json.loads(read_answer(connection)[1])["messages"]) == 1
            assert b"published" in read_answer(connection)[1]
            connection.sendall(request(group, '{"max_messages": 256}'))
            read_answer(connection)


@pytest.mark.parametrize("announced", ["1", "3"])
def test_a_body_of_another_length_than_before_is_read_as_announced(proxy: ProxyProcess, announced: str) -> None:
    pop = request(POP, "{}")
    other = pop.replace(b"Content-Length: 2", f"Content-Length: {announced}".encode())
    with connected(proxy) as connection:
        for _ in range(TIMES):
            connection.sendall(pop)
            read_answer(connection)
        connection.sendall(other)
        if announced == "1":  # "}" begins a request that is none: the connection ends
            assert connection.recv(1) == b""
        else:
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)


def test_a_connection_ends_when_it_is_asked_to(proxy: ProxyProcess, tmp_path: Path) -> None:
    last = request(POP, "{}", "Connection: close")
    for _ in range(2):
        with connected(proxy) as connection:
            connection.sendall(last)
            answer = b""
            while more := connection.recv(65_536):
                answer += more
            assert b"connection: close" in answer.lower()
