"""A server that requires keys, its administrator, and helpers to use it. Import the fixture `server` by name."""

import contextlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx
import pytest

from contract.http_server import problem, started_server
from popgate.domain.permissions import Action
from support.key_files import Key, KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess

SEEN_TOPIC, HIDDEN_TOPIC = "seen", "hidden"


LOCK_SECONDS = 30


class Guarded:
    """A server that requires keys, and its administrator."""

    def __init__(self, process: ProxyProcess, keys: KeyFile, admin: Key, *, forwards: bool) -> None:
        self.process = process
        self.forwards = forwards
        self.keys = keys
        self.admin = admin

    def send(
        self, method: str, path: str, key: Key | None = None, *, body: object = None, **headers: str
    ) -> httpx.Response:
        given = {**({} if key is None else key.headers), **headers}
        return self.process.client.request(method, path, json=body, headers=given)

    def known(self, key: Key) -> Key:
        """Return the key when the server has read it."""
        wait_until(lambda: self.send("GET", "/v1", key).status_code == 200, timeout_seconds=5, what="the key to count")
        return key

    def empty_group(self) -> str:
        """Return the path of a new group without messages."""
        topic = f"empty-{secrets.token_hex(4)}"
        for path in (f"topics/{topic}", f"topics/{topic}/groups/g"):
            body = None if path.endswith("/g") else {"queues": 1}
            assert self.send("PUT", f"/v1/admin/{path}", self.admin, body=body).status_code == 201
        return f"/v1/topics/{topic}/groups/g"

    def new(self, *grants: Mapping[str, object], **settings: object) -> Key:
        """Return the key of a new principal."""
        return self.known(self.keys.principal(f"p-{secrets.token_hex(4)}", *grants, **settings))


@pytest.fixture(scope="module", params=["embedded", "front"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with keys; as "front" it passes requests on to the proxy that owns the queues."""
    folder = tmp_path_factory.mktemp("access")
    keys = KeyFile(folder / "keys.toml")
    admin = keys.principal("admin", everything())
    flags = ["--keys-file", str(keys.path), "--auto-create", "true", "--audit-log", str(folder / "audit.jsonl")]
    with started_server(request, folder, *flags) as started:
        guarded = Guarded(started.process, keys, admin, forwards=started.owner is not None)
        for topic in (SEEN_TOPIC, HIDDEN_TOPIC):
            assert guarded.send("PUT", f"/v1/admin/topics/{topic}", admin, body={"queues": 1}).status_code == 201
            for group in ("seen", "hidden"):
                path = f"/v1/admin/topics/{topic}/groups/{group}"
                assert guarded.send("PUT", path, admin).status_code == 201
        yield guarded


def is_refused(server: Guarded, key: Key) -> bool:
    return server.send("GET", "/v1", key).status_code == 401


@pytest.fixture(scope="module")
def narrow(server: Guarded) -> Key:
    actions = [action.value for action in Action if action is not Action.METRICS]
    return server.new({"actions": actions, "topics": ["see*"], "groups": ["see*"], "locks": ["see*"]})


@contextlib.contextmanager
def connected(server: Guarded) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=10) as connection:
        yield connection


def head_of(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def status_on(connection: socket.socket) -> int:
    """Return the status of the next answer, and read its body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = connection.recv(1)
        assert more, f"the connection ended after {head!r}"
        head += more
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    while length:
        length -= len(connection.recv(length))
    return int(head.split()[1])


PUBLISH = f"/v1/topics/{SEEN_TOPIC}/messages"


POP = f"/v1/topics/{SEEN_TOPIC}/groups/seen/pop"


MESSAGE = {"messages": [{"body": "a message"}]}


class Parked:
    """A request that waits in a thread."""

    def __init__(self, server: Guarded, path: str, key: Key, body: object) -> None:
        self.seconds = 0.0
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, path, key, body), daemon=True)
        self._thread.start()

    def _run(self, server: Guarded, path: str, key: Key, body: object) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=server.process.url, timeout=40, trust_env=False) as client:
            self.response = client.post(path, json=body, headers=key.headers)
        self.seconds = time.monotonic() - began

    def ended(self, seconds: float) -> httpx.Response:
        self._thread.join(seconds)
        assert self.response is not None, f"it still waits after {seconds} s"
        return self.response


def lock_body(holder: str) -> object:
    return {"holder": holder, "ttl_seconds": LOCK_SECONDS, "wait_seconds": 20}


def limited(response: httpx.Response, limit: str) -> None:
    assert limit in problem(response, 429, "limit_exceeded")["detail"]
    assert int(response.headers["retry-after"]) >= 1


def audited(server: Guarded, **wanted: object) -> list[dict[str, Any]]:
    records = map(json.loads, (server.keys.path.parent / "audit.jsonl").read_text().splitlines())
    return [one for one in records if all(one.get(field) == value for field, value in wanted.items())]
