"""Pops from popgate: with separate acks, with the acks of the former pop in the request, or with its Python client.

Also empty requests to a server that does nothing, with the same connections.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from typing import Any

import orjson

from bench import load
from bench.systems.clients.client import BODY_BYTES, LEASE_SECONDS, WAIT_SECONDS, Client
from bench.systems.metering import Job, Meter
from popgate_client import AsyncClient

QUEUES = 4
TOPIC = "/v1/admin/topics/bench"
Work = Callable[[Job, Meter, load.Connection], Coroutine[None, None, None]]


async def _fill(job: Job) -> None:
    """Publish to a new topic, because the proxy then consumes and prefetches nothing until the first pop."""
    with closing(await load.connect(job.port)) as connection:
        await _admin(connection, "DELETE", TOPIC, ok=(200, 204, 404))
        await _admin(connection, "PUT", TOPIC, {"queues": QUEUES})
        await _admin(connection, "PUT", f"{TOPIC}/groups/default", {})
    await load.fill(job.port, total=job.total, body_bytes=BODY_BYTES)


async def _admin(
    connection: load.Connection, method: str, path: str, body: Any = None, ok: Sequence[int] = (200, 201)
) -> None:
    status, answer = await connection.request(method, path, b"" if body is None else orjson.dumps(body))
    if status not in ok:
        raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")


async def _pop(job: Job, connection: load.Connection, handles: list[str], wait_seconds: float) -> list[str]:
    """Pop, and ack ``handles`` in the same request, if any. Return the new handles. Raises: RuntimeError."""
    body: dict[str, Any] = {
        "max_messages": job.batch,
        "wait_seconds": wait_seconds,
        "invisibility_seconds": LEASE_SECONDS,
    }
    if handles:
        body["ack"] = handles
    answer = await connection.post(f"{load.SUBSCRIPTION}/pop", body)
    _check(answer.get("ack", []))
    return [message["receipt_handle"] for message in answer["messages"]]


async def _ack(connection: load.Connection, handles: list[str]) -> None:
    _check((await connection.post(f"{load.SUBSCRIPTION}/ack", {"receipt_handles": handles}))["results"])


def _check(results: list[dict[str, Any]]) -> None:
    if any(entry["status"] != "acked" for entry in results):
        raise RuntimeError(f"ack: {results}")


async def _separately(job: Job, meter: Meter, connection: load.Connection) -> None:
    while not meter.is_done:
        if handles := await _pop(job, connection, [], WAIT_SECONDS):
            await _ack(connection, handles)
            meter.settled(len(handles))


async def _together(job: Job, meter: Meter, connection: load.Connection) -> None:
    """Ack the messages of a pop with the next pop. The last pops don't wait, because their acks' answers would."""
    handles: list[str] = []
    while handles or not meter.is_done:
        popped = await _pop(job, connection, handles, WAIT_SECONDS if meter.has_plenty else 0.0)
        meter.settled(len(handles))
        meter.taken(len(popped))
        handles = popped


async def _empty(job: Job, meter: Meter, connection: load.Connection) -> None:
    """Count two requests as one message."""
    body = orjson.dumps({"max_messages": 1, "wait_seconds": 5})
    while not meter.is_done:
        for _ in range(2):
            await connection.request("POST", f"{load.SUBSCRIPTION}/pop", body)
        meter.settled(1)


async def _with_python_client(job: Job, meter: Meter) -> None:
    """Use popgate's own client for Python, one for each of the clients."""

    async def work(client: AsyncClient) -> None:
        while not meter.is_done:
            messages = await client.pop("bench", "default", job.batch, WAIT_SECONDS, LEASE_SECONDS)
            if messages:
                results = await client.ack("bench", "default", messages)
                meter.settled(sum(result.status == "acked" for result in results))

    async with AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{job.port}"
        clients = [await stack.enter_async_context(AsyncClient(url)) for _ in range(job.clients)]
        await asyncio.gather(*(client.info() for client in clients))  # opens the connections
        meter.start()
        await asyncio.gather(*(work(client) for client in clients))


def _client(work: Work, fill: Callable[[Job], Coroutine[None, None, None]] = _fill) -> Client:
    async def drain(job: Job, meter: Meter) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(closing(await load.connect(job.port))) for _ in range(job.clients)]
            meter.start()
            await asyncio.gather(*(work(job, meter, connection) for connection in connections))

    return Client(fill=fill, drain=drain)


async def _fill_nothing(_: Job) -> None:
    """The server that does nothing has no messages."""


POP_AND_ACK = _client(_separately)
SETTLE_ON_POP = _client(_together)
PYTHON_CLIENT = Client(fill=_fill, drain=_with_python_client)
EMPTY_REQUESTS = _client(_empty, _fill_nothing)
