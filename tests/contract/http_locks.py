"""One lock over HTTP, and helpers to use it. Import the fixtures `lock` and `pool` by name.

With the parameter "front" there are two proxies, and successive requests alternate between them: a lock granted through
one of them is verified, renewed and released through both.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aio_pika
import httpx
import pytest

from contract.http_server import HttpServer, Json, answer, problem, put
from popgate.amqp_locks import LockKind, Locks
from support.proxy import ProxyProcess

HOLDABLE: dict[str, dict[str, object]] = {
    "mutex": {"kind": "mutex"},
    "persistent_mutex": {"kind": "persistent_mutex"},
    "semaphore": {"kind": "semaphore"},
}
PEER_SECONDS_MAX = 8.0
NOT_ACQUIRED = {"acquired": False, "token": None, "fencing_token": None, "slot": None, "expires_at": None}

LOST_HERE = ("an operator released it", "deleted")
"""Only the proxy that took a lock away reports this; a proxy whose lock was taken through another one sees that its
slot is gone.
"""


class HttpLock:
    """One lock of a server, whose proxies are asked in turn; ``processes``: only these."""

    def __init__(self, server: HttpServer, name: str = "", processes: Sequence[ProxyProcess] = ()) -> None:
        self.server = server
        self.processes = processes or [one for one in (server.process, server.owner) if one is not None]
        self._turns = itertools.cycle(self.processes)
        self.name = name or f"l-{secrets.token_hex(4)}"
        self.path = f"/v1/locks/{self.name}"

    @property
    def client(self) -> httpx.Client:
        """Return the client of the next proxy."""
        return next(self._turns).client

    @property
    def has_peers(self) -> bool:
        return self.server.owner is not None

    def at(self, process: ProxyProcess) -> "HttpLock":
        """Return the same lock, through this proxy only."""
        return HttpLock(self.server, self.name, [process])

    @property
    def here(self) -> "HttpLock":
        """Return the same lock, through the server's own proxy."""
        return self.at(self.server.process)

    def define(self, **fields: object) -> Json:
        return put(self.client, self.path, fields)

    def ask(self, verb: str, **fields: object) -> Any:
        """Send the request; repeat it while a proxy does not yet know that the lock's holder has died."""
        deadline = time.monotonic() + PEER_SECONDS_MAX
        while True:
            response = self.client.post(f"{self.path}/{verb}", json=fields)
            if response.status_code != 503 or response.json()["code"] != "peer_unavailable":
                return response
            assert time.monotonic() < deadline, response.text
            time.sleep(0.1)

    def acquire(self, holder: str = "h", ttl_seconds: float = 60, **fields: object) -> Json:
        return answer(self.ask("acquire", holder=holder, ttl_seconds=ttl_seconds, **fields))

    def held(self, holder: str = "h", ttl_seconds: float = 60, wait_seconds: float = 5) -> Json:
        """Return a grant, which must be given."""
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
            if not self.has_peers or why not in LOST_HERE:
                assert why in document["detail"]
            assert "acquire it again" in document["detail"]
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
    return server.metrics().get(f"{name}{{{shown}}}", 0.0)


def wait_for_line(amqp_url: str, lock: str, count: int) -> None:
    """Return when that many clients wait in the broker's line for a mutex."""

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
