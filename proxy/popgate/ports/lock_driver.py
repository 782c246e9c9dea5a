"""The lock driver port: the few operations that the lock protocol needs from an AMQP program's connection.

A channel is private to one attempt or one grant. An error that ends it (a missing queue, a locked resource) affects no
other channel. All calls raise LockUnavailable when the broker does not answer; the channel has then ended. A cancelled
call may still take effect; closing the channel undoes it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class QueueRole(StrEnum):
    TOKEN = "token"
    """Replicated; one consumer at a time, in the order of their arrival; returned messages go to the front."""
    SLOT = "slot"
    """Replicated; stays empty."""
    HOLDER = "holder"
    """Replicated; keeps only the last message."""
    WAITING = "waiting"
    """Stays empty: only the number of its consumers matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The state of a queue. If a queue has one consumer at a time, RabbitMQ counts only that one: 0 or 1."""

    ready: int
    consumers: int


class Token(NamedTuple):
    """The token message as delivered to this channel. ``deliveries``: how often it was delivered before."""

    queue: str
    body: bytes
    deliveries: int


class LockListener(Protocol):
    """Receives the events of a channel. Both calls are synchronous, on the event loop, and must not raise."""

    def on_token(self, token: Token) -> None: ...

    def on_ended(self, reason: str) -> None:
        """Handle that the channel or its connection ended, or that a queue it waits on was deleted. Called at most
        once."""
        ...


class LockChannel(Protocol):
    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None:
        """Declare ``queue`` if it is missing. The broker deletes it if it is not used for ``kept_seconds``."""
        ...

    async def delete(self, queue: str) -> None:
        """Delete ``queue``. Idempotent."""
        ...

    async def state(self, queue: str) -> QueueState | None:
        """Return the state of ``queue``. None: there is no such queue, and the channel has ended."""
        ...

    async def put(self, queue: str, body: bytes) -> bool:
        """Store a message, and return once it is stored safely. False: there is no such queue."""
        ...

    async def last(self, queue: str) -> bytes | None:
        """Return the body of the message at the front, without removing it.

        None: there is no message, or another client is reading it; or there is no such queue, and the channel has
        ended.
        """
        ...

    async def wait_for_token(self, queue: str) -> bool:
        """Consume ``queue``; the listener is called when this channel gets the token.

        False: there is no such queue, and the channel has ended.
        """
        ...

    async def leave(self, queue: str) -> None:
        """Stop consuming ``queue``; if this channel has the token, the next consumer gets it."""
        ...

    async def return_token(self, queue: str) -> None:
        """Return the token but continue to consume. The token is redelivered at once, as one more delivery."""
        ...

    async def take(self, queue: str) -> bool:
        """Declare ``queue`` as exclusive to this connection; messages to it are dropped.

        False: another connection has it, and the channel has ended.
        """
        ...

    async def close(self) -> None:
        """Give up all that this channel holds; tokens go to the next consumers. Idempotent."""
        ...

    def abandon(self) -> None:
        """Close a channel on which a call received no answer, without waiting for the close."""
        ...


class LockDriver(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether the connection is open. A closed connection is never opened again."""
        ...

    async def open(self, listener: LockListener) -> LockChannel:
        """Open a channel."""
        ...


class LockConnection(Protocol):
    """A connection that is reopened after a loss, each time with a new driver."""

    async def start(self) -> None:
        """Connect. Raises: StartupError."""
        ...

    async def stop(self) -> None:
        """Disconnect, which releases all locks held over it. Idempotent, and safe before ``start``."""
        ...

    def driver(self) -> LockDriver:
        """Return the driver of the current connection. Raises: BrokerUnavailable while there is none."""
        ...
