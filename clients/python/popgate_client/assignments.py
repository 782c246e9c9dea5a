"""The calls of a pull client: its assignment, pull, commit and leave (decision 11).

Owns their paths, JSON shapes and exchanges, and the methods that `Client` and `AsyncClient` have for them. All of these
calls are idempotent, and are repeated. `pulling` follows an assignment.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from popgate_client.exchange import Exchange, Exchanges
from popgate_client.message import Message
from popgate_client.wire import (
    ANSWER_SECONDS,
    JsonObject,
    Request,
    T,
    encode,
    length_seconds,
    path_segment,
    read_answer,
    read_messages,
    subscription_path,
    without_none,
)

SUPPORTS = ("pop", "pull")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The queues that a client may pull from. `mode` is `pop`, `draining` or `pull`; `queues` is empty unless it is
    `pull`. Pass `generation` to every pull and commit; ask again after `heartbeat_seconds`."""

    mode: str
    generation: int
    queues: tuple[int, ...]
    heartbeat_seconds: float


def assign(
    exchanges: Exchanges, topic: str, group: str, client_id: str, supports: Sequence[str], generation: int | None
) -> Exchange[Assignment]:
    """Register the client, or send its heartbeat. A heartbeat with `generation` confirms that the client has released
    every queue that is not in that assignment."""
    fields = {"client_id": client_id, "supports": list(supports), "generation": generation}
    path = f"{subscription_path(topic, group)}/assignment"
    return read_answer((yield from exchanges.repeatable(_post(path, fields))), _assignment)


def pull(
    exchanges: Exchanges,
    topic: str,
    group: str,
    queue: int,
    client_id: str,
    generation: int,
    *,
    max_messages: int,
    wait_seconds: float,
    after: str | None,
) -> Exchange[list[Message]]:
    """Return the next messages of a queue, in order."""
    fields = {
        "client_id": client_id,
        "generation": generation,
        "max_messages": max_messages,
        "wait_seconds": wait_seconds,
        "after": after,
    }
    request = _post(f"{_queue_path(topic, group, queue)}/pull", fields, wait_seconds)
    return read_messages((yield from exchanges.repeatable(request)), topic, group, Message)


def commit(
    exchanges: Exchanges, topic: str, group: str, queue: int, client_id: str, generation: int, receipt_handle: str
) -> Exchange[int]:
    """Settle all messages up to this one, and return how many were settled."""
    fields = {"client_id": client_id, "generation": generation, "receipt_handle": receipt_handle}
    request = _post(f"{_queue_path(topic, group, queue)}/commit", fields)
    return read_answer((yield from exchanges.repeatable(request)), lambda body: int(body["committed"]))


def leave(exchanges: Exchanges, topic: str, group: str, client_id: str) -> Exchange[None]:
    """End the session: uncommitted messages return to their queues at once."""
    path = f"{subscription_path(topic, group)}/assignment/{path_segment('client_id', client_id)}"
    yield from exchanges.repeatable(Request(method="DELETE", path=path))


def _queue_path(topic: str, group: str, queue: int) -> str:
    return f"{subscription_path(topic, group)}/queues/{queue}"


def _post(path: str, fields: JsonObject, wait_seconds: float = 0.0) -> Request:
    silence_seconds = max(0.0, wait_seconds) + ANSWER_SECONDS
    return Request(method="POST", path=path, content=encode(without_none(fields)), silence_seconds=silence_seconds)


def _assignment(body: JsonObject) -> Assignment:
    return Assignment(
        mode=str(body["mode"]),
        generation=int(body["generation"]),
        queues=tuple(int(queue) for queue in body["queues"]),
        heartbeat_seconds=length_seconds(body["heartbeat_seconds"]),
    )


def _receipt(message: Message | str) -> str:
    return message.receipt_handle if isinstance(message, Message) else message


class PullCalls(ABC):
    """The calls of a pull client, on `Client`. A `Consumer` makes all of them automatically."""

    _exchanges: Exchanges

    @abstractmethod
    def perform(self, exchange: Exchange[T]) -> T: ...

    def assignment(
        self,
        topic: str,
        group: str,
        client_id: str,
        *,
        supports: Sequence[str] = SUPPORTS,
        generation: int | None = None,
    ) -> Assignment:
        """Register `client_id`, or send its heartbeat, and return which queues it may pull.

        generation: the one of the last answer; this confirms that the client has released every queue that is not in
            that assignment. None: a new session begins, and uncommitted messages of the previous one return.

        Raises WrongMode if the client supports only `pull` and the group is in another mode, and NotSupported if the
        server has no pull mode.
        """
        return self.perform(assign(self._exchanges, topic, group, client_id, supports, generation))

    def pull(
        self,
        topic: str,
        group: str,
        queue: int,
        client_id: str,
        generation: int,
        *,
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        after: Message | str | None = None,
    ) -> list[Message]:
        """Return up to `max_messages` (1 to 256) of an assigned queue, in order; wait up to `wait_seconds` (0 to 30).

        after: the last message seen, or its receipt handle. None: all uncommitted messages are delivered again, from
            the first one.

        A later pull of the same queue ends this one. The messages have no lease that expires: uncommitted ones return
        when the client leaves, sends no heartbeats, or loses the queue. Raises Fenced if another client has the queue
        now, WrongMode, TooManyInFlight.
        """
        handle = None if after is None else _receipt(after)
        return self.perform(
            pull(
                self._exchanges,
                topic,
                group,
                queue,
                client_id,
                generation,
                max_messages=max_messages,
                wait_seconds=wait_seconds,
                after=handle,
            )
        )

    def commit(
        self, topic: str, group: str, queue: int, client_id: str, generation: int, message: Message | str
    ) -> int:
        """Settle a pulled message (or its receipt handle) and all earlier ones of its queue; return how many were
        settled. Raises WrongMode, and Fenced if another client has the queue now; nothing is settled then."""
        return self.perform(commit(self._exchanges, topic, group, queue, client_id, generation, _receipt(message)))

    def leave(self, topic: str, group: str, client_id: str) -> None:
        """End the session: uncommitted messages return at once, and other clients get the queues."""
        self.perform(leave(self._exchanges, topic, group, client_id))


class AsyncPullCalls(ABC):
    """The calls of a pull client, on `AsyncClient`."""

    _exchanges: Exchanges

    @abstractmethod
    def perform(self, exchange: Exchange[T]) -> Awaitable[T]: ...

    async def assignment(
        self,
        topic: str,
        group: str,
        client_id: str,
        *,
        supports: Sequence[str] = SUPPORTS,
        generation: int | None = None,
    ) -> Assignment:
        """Register a client, or send its heartbeat, and return its queues. See `Client.assignment`."""
        return await self.perform(assign(self._exchanges, topic, group, client_id, supports, generation))

    async def pull(
        self,
        topic: str,
        group: str,
        queue: int,
        client_id: str,
        generation: int,
        *,
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        after: Message | str | None = None,
    ) -> list[Message]:
        """Return the next messages of an assigned queue, in order. See `Client.pull`."""
        handle = None if after is None else _receipt(after)
        return await self.perform(
            pull(
                self._exchanges,
                topic,
                group,
                queue,
                client_id,
                generation,
                max_messages=max_messages,
                wait_seconds=wait_seconds,
                after=handle,
            )
        )

    async def commit(
        self, topic: str, group: str, queue: int, client_id: str, generation: int, message: Message | str
    ) -> int:
        """Settle a pulled message and all earlier ones of its queue. See `Client.commit`."""
        return await self.perform(
            commit(self._exchanges, topic, group, queue, client_id, generation, _receipt(message))
        )

    async def leave(self, topic: str, group: str, client_id: str) -> None:
        """End the session. See `Client.leave`."""
        await self.perform(leave(self._exchanges, topic, group, client_id))
