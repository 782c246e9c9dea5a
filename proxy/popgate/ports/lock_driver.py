"""The lock driver port: the few things that the lock protocol asks of an AMQP program's connection.

A channel is private to one attempt or one grant: what breaks it (a queue that is missing, a resource that is locked)
breaks nobody else's. All calls raise LockUnavailable when the broker can't be asked; the channel has then ended. A call
that is cancelled may yet take effect; closing the channel undoes it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class QueueRole(StrEnum):
    TOKEN = "token"
    """Replicated; one consumer at a time, in the order in which they came; what is returned goes to the front."""
    SLOT = "slot"
    """Replicated; stays empty."""
    HOLDER = "holder"
    """Replicated; keeps the last message only."""
    WAITING = "waiting"
    """Stays empty: its consumers are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """Of a queue with one consumer at a time RabbitMQ counts that one only: 0 or 1."""

    ready: int
    consumers: int


class Token(NamedTuple):
    """The token message as it was handed to this channel. ``deliveries``: how often it was handed out before."""

    queue: str
    body: bytes
    deliveries: int


class LockListener(Protocol):
    """Who is told about a channel. Both calls are synchronous, on the event loop, and must not raise."""

    def on_token(self, token: Token) -> None: ...

    def on_ended(self, reason: str) -> None:
        """The channel or its connection has ended, or a queue that it waits on was deleted. At most once."""
        ...


class LockChannel(Protocol):
    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None:
        """Make ``queue`` if it is missing; unused for ``kept_seconds`` it is removed."""
        ...

    async def delete(self, queue: str) -> None:
        """Idempotent."""
        ...

    async def state(self, queue: str) -> QueueState | None:
        """None: there is no such queue, and the channel has ended."""
        ...

    async def put(self, queue: str, body: bytes) -> bool:
        """Store a message; returns once it is safe. False: there is no such queue."""
        ...

    async def last(self, queue: str) -> bytes | None:
        """The body of the message at the front, which stays. None: there is none, or somebody else reads it just now,
        or there is no such queue, and the channel has ended."""
        ...

    async def wait_for_token(self, queue: str) -> bool:
        """Consume ``queue``: stand in its line; the listener hears when its turn has come.

        False: there is no such queue, and the channel has ended.
        """
        ...

    async def leave(self, queue: str) -> None:
        """Leave the line; a token that this channel has goes to the next."""
        ...

    async def turn_over(self, queue: str) -> None:
        """Return the token, without leaving: it comes back at once, handed out once more."""
        ...

    async def take(self, queue: str) -> bool:
        """Make ``queue`` exclusive to this connection; what is put into it is dropped. False: somebody else has it, and
        the channel has ended."""
        ...

    async def close(self) -> None:
        """Leave everything: what this channel has goes to the next. Idempotent."""
        ...

    def abandon(self) -> None:
        """``close``, without waiting for it: for a channel on which a question was not answered."""
        ...


class LockDriver(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether the connection stands. One that doesn't never comes back."""
        ...

    async def open(self, listener: LockListener) -> LockChannel:
        """A new channel."""
        ...


class LockConnection(Protocol):
    """A connection that is opened again when it was lost, each time with another driver."""

    async def start(self) -> None:
        """Connect. Raises: StartupError."""
        ...

    async def stop(self) -> None:
        """Disconnect; whatever was held over it is free then. Idempotent, and safe before ``start``."""
        ...

    def driver(self) -> LockDriver:
        """That of the connection which stands now. Raises: BrokerUnavailable while there is none."""
        ...
