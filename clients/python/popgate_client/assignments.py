"""The calls of a pull client: its assignment, pull, commit and leave (design section 3, "Pull fallback").

Owns their paths, JSON shapes and exchanges, and the two faces that `Client` and `AsyncClient` have of them. All of them
may be repeated unharmed, and are. Following an assignment is `pulling`'s affair.
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
    path_segment,
    read_answer,
    read_messages,
    subscription_path,
    without_none,
)

SUPPORTS = ("pop", "pull")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a client may pull from. `mode` is `pop`, `draining` or `pull`; in another one than `pull` there are no
    queues. `generation` goes into every pull and commit; ask again after `heartbeat_seconds`."""

    mode: str
    generation: int
    queues: tuple[int, ...]
    heartbeat_seconds: float


def assign(
    exchanges: Exchanges, topic: str, group: str, client_id: str, supports: Sequence[str], generation: int | None
) -> Exchange[Assignment]:
    """Registers, or shows that the client lives and has let go of what is not in the assignment `generation`."""
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
    """The next messages of a queue, in order."""
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
    """How many messages this has settled."""
    fields = {"client_id": client_id, "generation": generation, "receipt_handle": receipt_handle}
    request = _post(f"{_queue_path(topic, group, queue)}/commit", fields)
    return read_answer((yield from exchanges.repeatable(request)), lambda body: int(body["committed"]))


def leave(exchanges: Exchanges, topic: str, group: str, client_id: str) -> Exchange[None]:
    """What is not committed returns at once."""
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
        heartbeat_seconds=float(body["heartbeat_seconds"]),
    )


def _receipt(message: Message | str) -> str:
    return message.receipt_handle if isinstance(message, Message) else message


class PullCalls(ABC):
    """The calls of a pull client, on `Client`. A `Consumer` makes all of them by itself."""

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
        """Register `client_id`, or show that it lives, and learn which queues are its own.

        generation: as the last answer had it: the client has let go of every queue that is not in that one. None: it
            begins anew, and what it had returns.

        Raises WrongMode where it supports `pull` alone and the group is in another mode, and NotSupported where the
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
        """Up to `max_messages` (1 to 256) of an assigned queue, in order, waiting up to `wait_seconds` (0 to 30).

        after: the last message seen, or its receipt handle; None: all that is not committed comes again, from its
            beginning. A later pull of the same queue ends this one.

        The messages have no end of a lease: what is not committed returns when the client leaves, is not heard of, or
        loses the queue. Raises Fenced where the queue is another client's now, WrongMode, TooManyInFlight.
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
        """Settle a pulled message, or receipt handle, and all of its queue before it; returns how many that were.
        Raises Fenced where the queue is another client's now: nothing was settled then. WrongMode."""
        return self.perform(commit(self._exchanges, topic, group, queue, client_id, generation, _receipt(message)))

    def leave(self, topic: str, group: str, client_id: str) -> None:
        """Give up the session: what is not committed returns at once, and others get the queues."""
        self.perform(leave(self._exchanges, topic, group, client_id))


class AsyncPullCalls(ABC):
    """The same, on `AsyncClient`."""

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
        """Register a client, or show that it lives, and learn its queues. See `Client.assignment`."""
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
        """The next messages of an assigned queue, in order. See `Client.pull`."""
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
        """Settle a pulled message and all of its queue before it. See `Client.commit`."""
        return await self.perform(
            commit(self._exchanges, topic, group, queue, client_id, generation, _receipt(message))
        )

    async def leave(self, topic: str, group: str, client_id: str) -> None:
        """Give up the session. See `Client.leave`."""
        await self.perform(leave(self._exchanges, topic, group, client_id))
