"""A lean HTTP load client: keep-alive connections on asyncio protocols, so that the proxy dominates the measurement.

This module owns connections and the pop-and-ack loop. It does not know what is compared.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from support.proxy import ProxyProcess

SUBSCRIPTION = "/v1/topics/bench/groups/default"
WAIT_SECONDS = 1
"""Wait time of a pop in seconds; the last pop, when everything is taken, waits that long in vain."""


class Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self._need = 0
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._need:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._body_at = end + 4
            self._need = self._body_at + length
        if len(self._buffer) >= self._need:
            status = int(self._buffer[9:12])
            body = bytes(self._buffer[self._body_at : self._need])
            del self._buffer[: self._need]
            self._need = 0
            assert self._answer is not None
            self._answer.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server closed the connection"))

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return (status, body) of one request."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self._transport.write(head + body)
        return await self._answer

    async def post(self, path: str, body: Any) -> Any:
        """Return the decoded answer of a JSON request. Raises: RuntimeError if it isn't 2xx."""
        status, answer = await self.request("POST", path, orjson.dumps(body))
        if not 200 <= status < 300:
            raise RuntimeError(f"{path}: {status} {answer[:300]!r}")
        return orjson.loads(answer)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


@dataclass(slots=True)
class Drained:
    """The result of one drain: ``messages`` popped and acked in ``seconds``."""

    messages: int = 0
    seconds: float = 0.0
    pop_seconds: list[float] = field(default_factory=list[float])

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


async def drain(port: int, *, total: int, batch: int, clients: int = 8) -> Drained:
    """Pop and ack ``total`` messages with ``clients`` connections in batches of ``batch``."""
    result = Drained()
    connections = [await connect(port) for _ in range(clients)]
    pop = orjson.dumps({"max_messages": batch, "wait_seconds": WAIT_SECONDS, "invisibility_seconds": 600})

    async def work(connection: Connection) -> None:
        while result.messages < total:
            status, answer = await connection.request("POST", f"{SUBSCRIPTION}/pop", pop)
            if status != 200:
                raise RuntimeError(f"pop: {status} {answer[:300]!r}")
            handles = [message["receipt_handle"] for message in orjson.loads(answer)["messages"]]
            if not handles:
                if result.messages >= total:
                    return
                continue
            answer = await connection.post(f"{SUBSCRIPTION}/ack", {"receipt_handles": handles})
            if any(entry["status"] != "acked" for entry in answer["results"]):
                raise RuntimeError(f"ack: {answer}")
            result.messages += len(handles)
            if result.messages >= total:
                result.seconds = min(result.seconds or float("inf"), time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    for connection in connections:
        connection.close()
    return result


async def fill(
    port: int,
    *,
    total: int,
    body_bytes: int = 1024,
    batch: int = 256,
    clients: int = 4,
    dedup: bool = False,
    delay_seconds: float = 0,
    keys: int = 0,
) -> float:
    """Publish ``total`` messages with ``clients`` connections; return messages a second.

    Each has a new ``dedup_id`` if ``dedup``, and one of ``keys`` ordering keys in turn, if any.
    """
    fields: dict[str, Any] = {"body": "x" * body_bytes}
    if delay_seconds:
        fields["delay_seconds"] = delay_seconds
    prefix = secrets.token_hex(8)
    connections = [await connect(port) for _ in range(clients)]
    left = total

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            count = min(batch, left)
            left -= count
            messages = [fields] * count
            if dedup:
                messages = [{**fields, "dedup_id": f"{prefix}-{left + number}"} for number in range(count)]
            if keys:
                messages = [{**fields, "ordering_key": f"k{(left + number) % keys}"} for number in range(count)]
            answer = await connection.post("/v1/topics/bench/messages", {"messages": messages})
            if any(entry["status"] != "published" for entry in answer["results"]):
                raise RuntimeError(f"publish: {answer}")

    started = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return total / seconds


def make_topic(proxy: ProxyProcess, queues: int = 4) -> None:
    """Create the topic and the group used by every figure."""
    proxy.client.put("/v1/admin/topics/bench", json={"queues": queues}).raise_for_status()
    proxy.client.put("/v1/admin/topics/bench/groups/default").raise_for_status()


async def echo_rate(port: int, *, total: int, clients: int = 8) -> float:
    """Return requests a second of an endpoint that does nothing."""
    connections = [await connect(port) for _ in range(clients)]
    left = total
    body = orjson.dumps({"max_messages": 1, "wait_seconds": 5})

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await connection.request("POST", f"{SUBSCRIPTION}/pop", body)

    started = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return total / seconds
