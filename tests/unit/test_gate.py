"""How the gate ends requests that wait, if one of them fails to end, or is ending by itself at this moment."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from popgate.api import gate
from popgate.api.connection import EXTENSION, Connection
from popgate.api.gate import Gate
from popgate.auth.credentials import Credentials
from popgate.auth.watched_keys import WatchedKeys
from popgate.domain.permissions import Caller
from popgate.engine.lease.pop_request import Presence
from popgate.runtime.timeouts import expire_now
from support.key_files import Key, KeyFile, everything

PATIENCE_SECONDS = 10


class Transport(asyncio.Transport):
    """A transport of a connection that is open."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def pop_with(key: Key) -> dict[str, Any]:
    """Return the scope of a pop, without its connection."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/topics/t/groups/g/pop",
        "headers": [(b"authorization", f"Bearer {key.token}".encode())],
        "client": ("127.0.0.1", 1),
    }


class Waiting:
    """A request that waits behind the gate until its presence leaves."""

    def __init__(self, gate: Gate, key: Key, on_leave: Callable[[], None]) -> None:
        self.statuses: list[int] = []
        self.connection = Connection(Transport())
        self._on_leave = on_leave
        self._gate = gate
        scope = {
            **pop_with(key),
            "extensions": {EXTENSION: self.connection},
            "waiting": self,
        }
        self.task = asyncio.ensure_future(gate(scope, receive, self._send))

    async def serve(self) -> None:
        left = asyncio.Event()

        def leave() -> None:
            left.set()
            self._on_leave()

        presence = self.connection.presence = Presence()
        presence.on_leave = leave
        await left.wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["waiting"].serve()


async def ended(waiting: Sequence[Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*waiting)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.toml")


async def test_a_request_that_can_not_be_ended_keeps_no_other_waiting(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "CHECK_SECONDS", 0.01)

    def fail() -> None:
        raise RuntimeError("it ends by itself at this moment")

    keys.principal("stays", everything())
    first, second = keys.principal("first", everything()), keys.principal("second", everything())
    watched = WatchedKeys(keys.path)
    watched.load()
    guard = Gate(app, Credentials(watched, None), topics=list)
    running = asyncio.gather(guard.run(), watched.run())
    waiting = [Waiting(guard, key, leave) for key in (first, second) for leave in (fail, lambda: None, fail)]
    await asyncio.sleep(0.05)
    assert [one.statuses for one in waiting] == [[]] * len(waiting), "they wait"
    del keys.principals["first"], keys.principals["second"]
    keys.write()
    await ended([one.task for one in waiting])
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert "could not be ended" in caplog.text


async def test_others_are_served_while_many_requests_end(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(gate, "ENDED_AT_ONCE_MAX", 10)
    keys.principal("stays", everything())
    key = keys.principal("goes", everything())
    watched = WatchedKeys(keys.path)
    watched.load()
    guard = Gate(app, Credentials(watched, None), topics=list)
    served, ended_after = 0, list[int]()

    async def serve_others() -> None:
        nonlocal served
        while True:
            served += 1
            await asyncio.sleep(0)

    running = asyncio.gather(guard.run(), watched.run(), serve_others())
    waiting = [Waiting(guard, key, lambda: ended_after.append(served)) for _ in range(50)]
    await asyncio.sleep(0.05)
    del keys.principals["goes"]
    keys.write()
    await ended([one.task for one in waiting])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(ended_after) == 50
    assert max(ended_after.count(turn) for turn in ended_after) <= 10


async def test_the_permissions_of_others_are_not_compared_again_when_a_key_expires(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be many, and keys and tokens can expire often."""
    monkeypatch.setattr(gate, "CHECK_SECONDS", 0.01)
    stays = keys.principal("stays", everything())
    keys.principal("goes", everything())
    goes = keys.key("goes", expires=datetime.now(UTC) + timedelta(seconds=2))
    watched = WatchedKeys(keys.path)
    watched.load()
    guard = Gate(app, Credentials(watched, None), topics=list)
    waiting = [Waiting(guard, key, lambda: None) for key in (stays, goes)]
    await asyncio.sleep(0.05)
    compared: list[object] = []

    def may(*given: object) -> bool:
        compared.append(given)
        return True

    monkeypatch.setattr(gate, "_may", may)
    running = asyncio.ensure_future(guard.run())
    await ended([waiting[1].task])
    assert not waiting[0].task.done()
    assert compared == []
    running.cancel()
    waiting[0].task.cancel()
    await asyncio.gather(running, waiting[0].task, return_exceptions=True)


async def test_a_limit_that_is_expiring_already_is_left_alone() -> None:
    limit = asyncio.timeout(0)

    async def wait() -> None:
        async with limit:
            asyncio.get_running_loop().call_later(0, expire_now, limit)  # in the turn in which it expires
            await asyncio.sleep(PATIENCE_SECONDS)

    with pytest.raises(TimeoutError):
        await wait()
    expire_now(limit)


def test_a_presence_leaves_once() -> None:
    presence, left = Presence(), list[int]()
    presence.on_leave = lambda: left.append(1)
    presence.leave()
    presence.leave()
    assert left == [1]


@pytest.mark.parametrize(("bytes_max", "times"), [(gate.REMEMBERED_BYTES_MAX, 1), (85, 2)])
async def test_a_decision_is_remembered_only_if_it_takes_little_memory(
    keys: KeyFile, monkeypatch: pytest.MonkeyPatch, bytes_max: int, times: int
) -> None:
    monkeypatch.setattr(gate, "REMEMBERED_BYTES_MAX", bytes_max)
    key = keys.principal("one", everything())
    watched = WatchedKeys(keys.path)
    watched.load()
    credentials = Credentials(watched, None)
    proved: list[str] = []

    async def caller(token: str) -> Caller:
        proved.append(token)
        return await prove(token)

    prove = credentials.caller
    monkeypatch.setattr(credentials, "caller", caller)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ignore(message: Any) -> None: ...

    guard = Gate(answer, credentials, topics=list)
    for _ in range(2):
        scope = {
            **pop_with(key),
            "extensions": {EXTENSION: Connection(Transport())},
        }
        await guard(scope, receive, ignore)
    assert len(proved) == times
