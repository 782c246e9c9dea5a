"""A pop client and a pull client that take and settle messages with the same work, so that they can be compared.

Each has one keep-alive connection. This module owns the requests, not the measurement.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from http import HTTPStatus
from typing import Any, Protocol

import orjson

from bench import load

Messages = Sequence[dict[str, Any]]
ASSIGNED_SECONDS_MAX = 30.0


class Taker(Protocol):
    """One client: takes up to a number of messages, and settles all of them in one request."""

    async def take(self, max_messages: int, wait_seconds: float) -> Messages: ...

    async def settle(self, messages: Messages) -> bool:
        """Settle them; tell whether all are settled, and none of them may be with another client by now."""
        ...


class PopTaker:
    def __init__(self, connection: load.Connection, path: str, invisibility_seconds: float = 600.0) -> None:
        self._connection = connection
        self._path = path
        self._seconds = invisibility_seconds

    async def take(self, max_messages: int, wait_seconds: float) -> Messages:
        order = {"max_messages": max_messages, "wait_seconds": wait_seconds, "invisibility_seconds": self._seconds}
        messages: Messages = (await self._connection.post(f"{self._path}/pop", order))["messages"]
        return messages

    async def settle(self, messages: Messages) -> bool:
        handles = [message["receipt_handle"] for message in messages]
        answer = await self._connection.post(f"{self._path}/ack", {"receipt_handles": handles})
        return all(result["status"] == "acked" for result in answer["results"])


class PullSession:
    """A pull client's registration: its queues and their generation. `ask` is its heartbeat."""

    def __init__(self, connection: load.Connection, path: str, client_id: str) -> None:
        self.client_id = client_id
        self.generation = 0
        self.queues: Sequence[int] = ()
        self._connection = connection
        self._path = path

    async def ask(self) -> float:
        """Send a heartbeat that also confirms the release of unassigned queues; take over the new assignment.

        Returns the seconds until the next heartbeat.
        """
        body: dict[str, object] = {"client_id": self.client_id, "supports": ["pop", "pull"]}
        if self.generation:  # otherwise the client starts again
            body["generation"] = self.generation
        answer = await self._connection.post(f"{self._path}/assignment", body)
        self.generation, self.queues = answer["generation"], answer["queues"]
        heartbeat_seconds: float = answer["heartbeat_seconds"]
        return heartbeat_seconds

    async def leave(self) -> None:
        await self._connection.request("DELETE", f"{self._path}/assignment/{self.client_id}")


class PullTaker:
    """Takes from one queue of its session. Messages that it was given and does not commit are skipped when it takes
    more.
    """

    def __init__(self, connection: load.Connection, path: str, session: PullSession, queue: int) -> None:
        self._connection = connection
        self._path = f"{path}/queues/{queue}"
        self._session = session
        self._after: dict[str, str] = {}
        self.is_lost = False
        """Whether another client had the queue by then, or this one got it again: ask for the assignment."""

    async def take(self, max_messages: int, wait_seconds: float) -> Messages:
        order = {**self._who(), "max_messages": max_messages, "wait_seconds": wait_seconds, **self._after}
        answer = await self._post("pull", order)
        messages: Messages = [] if answer is None else answer["messages"]
        if messages:
            self._after = {"after": messages[-1]["receipt_handle"]}
        return messages

    async def settle(self, messages: Messages) -> bool:
        answer = await self._post("commit", {**self._who(), "receipt_handle": messages[-1]["receipt_handle"]})
        self._after = {}
        return answer is not None

    def _who(self) -> dict[str, object]:
        return {"client_id": self._session.client_id, "generation": self._session.generation}

    async def _post(self, verb: str, body: object) -> dict[str, Any] | None:
        """Return the answer; None if ``is_lost``."""
        status, answer = await self._connection.request("POST", f"{self._path}/{verb}", orjson.dumps(body))
        if status == HTTPStatus.CONFLICT:
            self.is_lost = True
            return None
        if status != HTTPStatus.OK:
            raise RuntimeError(f"{verb}: {status} {answer[:300]!r}")
        content: dict[str, Any] = orjson.loads(answer)
        return content


@asynccontextmanager
async def pop_takers(port: int, count: int, path: str = load.SUBSCRIPTION) -> AsyncGenerator[list[Taker]]:
    connections = [await load.connect(port) for _ in range(count)]
    try:
        yield [PopTaker(connection, path) for connection in connections]
    finally:
        for connection in connections:
            connection.close()


@asynccontextmanager
async def pull_takers(port: int, count: int, path: str = load.SUBSCRIPTION) -> AsyncGenerator[list[Taker]]:
    """Open as many clients as there are queues, each with one of them."""
    connections = [await load.connect(port) for _ in range(count)]
    with closing(await load.connect(port)) as for_heartbeats:
        sessions = [PullSession(for_heartbeats, path, f"client-{number}") for number in range(count)]
        await assigned(sessions, count)
        async with asyncio.TaskGroup() as group:
            heartbeat = group.create_task(_heartbeats(sessions))
            try:
                yield [
                    PullTaker(connection, path, session, session.queues[0])
                    for connection, session in zip(connections, sessions, strict=True)
                ]
            finally:
                heartbeat.cancel()
        for session in sessions:
            await session.leave()
    for connection in connections:
        connection.close()


async def assigned(sessions: Sequence[PullSession], queues: int) -> None:
    """Return once each of ``sessions``, as many as there are ``queues``, has one queue."""
    async with asyncio.timeout(ASSIGNED_SECONDS_MAX):
        while True:
            for session in sessions:
                await session.ask()
            if sorted(queue for session in sessions for queue in session.queues) == [*range(queues)] and all(
                len(session.queues) == 1 for session in sessions
            ):
                return
            await asyncio.sleep(0.05)


async def _heartbeats(sessions: Sequence[PullSession]) -> None:
    """Send heartbeats one after the other, because the sessions share a connection."""
    while True:
        pauses = [await session.ask() for session in sessions]
        await asyncio.sleep(min(pauses))
