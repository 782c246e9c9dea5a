"""One lock over HTTP, and words to talk to it. Import the fixtures `lock` and `pool` by name."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aio_pika
import pytest

from contract.http_server import HttpServer, Json, answer, problem, put
from popgate.amqp_locks import LockKind, Locks

HOLDABLE: dict[str, dict[str, object]] = {
    "mutex": {"kind": "mutex"},
    "persistent_mutex": {"kind": "persistent_mutex"},
    "semaphore": {"kind": "semaphore"},
}
NOT_ACQUIRED = {"acquired": False, "token": None, "fencing_token": None, "slot": None, "expires_at": None}


class HttpLock:
    """One lock of a server."""

    def __init__(self, server: HttpServer, name: str = "") -> None:
        self.server = server
        self.client = server.client
        self.name = name or f"l-{secrets.token_hex(4)}"
        self.path = f"/v1/locks/{self.name}"

    def define(self, **fields: object) -> Json:
        return put(self.client, self.path, fields)

    def ask(self, verb: str, **fields: object) -> Any:
        return self.client.post(f"{self.path}/{verb}", json=fields)

    def acquire(self, holder: str = "h", ttl_seconds: float = 60, **fields: object) -> Json:
        return answer(self.ask("acquire", holder=holder, ttl_seconds=ttl_seconds, **fields))

    def held(self, holder: str = "h", ttl_seconds: float = 60, wait_seconds: float = 5) -> Json:
        """A grant that must come."""
        grant = self.acquire(holder, ttl_seconds, wait_seconds=wait_seconds)
        assert grant["acquired"] is True
        assert len(grant["token"]) >= 32
        return grant

    def verify(self, grant: Json) -> Json:
        return answer(self.ask("verify", token=grant["token"]))

    def release(self, grant: Json) -> bool:
        return bool(answer(self.ask("release", token=grant["token"]))["released"])

    def is_lost(self, grant: Json, why: str = "") -> None:
        for verb in ("verify", "renew"):
            document = problem(self.ask(verb, token=grant["token"]), 409, "lock_lost")
            assert why in document["detail"]
            assert "acquire it anew" in document["detail"]
            assert grant["token"] not in document["detail"]

    def view(self) -> Json:
        return answer(self.client.get(self.path))

    def wait_for_waiting(self, count: int) -> None:
        wait_for(lambda: self.view()["waiting"] == count)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < deadline, "waited 8 s in vain"
        time.sleep(0.01)


def metric(server: HttpServer, name: str, **labels: str) -> float:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    lines = server.client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{{shown}}}")), 0.0)


def wait_for_line(amqp_url: str, lock: str, count: int) -> None:
    """Return when so many stand in the broker's line for a mutex: they are counted once they do."""

    async def waiting() -> int:
        async with await aio_pika.connect(amqp_url) as connection:
            locks = Locks(connection)
            status = await locks.administration.status(lock, LockKind.MUTEX)
            await locks.close()
            return status.waiting

    wait_for(lambda: asyncio.run(waiting()) == count)


@pytest.fixture
def lock(lock_server: HttpServer) -> HttpLock:
    return HttpLock(lock_server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool
