"""Defines the lock driver port: the operations on an AMQP connection that the lock protocol needs.

Each attempt to acquire a lock, and each grant, has a separate channel. An error that ends a channel (a missing queue, a
locked resource) affects no other channel. All calls raise LockUnavailable if the broker does not answer; the channel
has then ended. A cancelled call may still take effect. Closing the channel reverses this effect.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from popgate.domain.errors import LockUnavailable


class QueueRole(StrEnum):
    TOKEN = "token"
    """A replicated queue with a single active consumer. Consumers become active in the order in which they subscribed.
    Returned messages go to the front of the queue."""
    SLOT = "slot"
    """A replicated queue that stays empty."""
    HOLDER = "holder"
    """A replicated queue that stores only the last message."""
    WAITING = "waiting"
    """A queue that stays empty, because only the number of its consumers matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The state of a queue. If the queue has a single active consumer, RabbitMQ counts only that consumer: 0 or 1."""

    ready: int
    consumers: int


class Token(NamedTuple):
    """The token message of ``queue``, as it was delivered to this channel. ``deliveries``: number of earlier
    deliveries."""

    queue: str
    body: bytes
    deliveries: int


class NotStoredError(LockUnavailable):
    """The broker has refused to store a message. Its queue is just ending, or has no majority of its nodes."""


class LockListener(Protocol):
    """Receives the events of a channel. Both calls are synchronous, on the event loop, and must not raise."""

    def on_token(self, token: Token) -> None: ...

    def on_ended(self, reason: str) -> None:
        """Handle that the channel or its connection ended, or that a queue that the channel consumes was deleted.

        Called at most once.
        """
        ...


class LockChannel(Protocol):
    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None:
        """Declare ``queue`` if it is missing. The broker deletes it after ``kept_seconds`` without use (None:
        never)."""
        ...

    async def delete(self, queue: str) -> None:
        """Delete ``queue``. Idempotent."""
        ...

    async def state(self, queue: str) -> QueueState | None:
        """Return the state of ``queue``. Return None if the queue does not exist; the channel has then ended."""
        ...

    async def put(self, queue: str, body: bytes) -> bool:
        """Store a message, and return True when it is stored safely. Return False if ``queue`` does not exist.

        Raises: NotStoredError.
        """
        ...

    async def last(self, queue: str) -> bytes | None:
        """Return the body of the message at the front of ``queue``, without removing the message.

        Return None if the queue is empty, or if another client is reading its message. Also return None if the queue
        does not exist; the channel has then ended.
        """
        ...

    async def wait_for_token(self, queue: str) -> bool:
        """Consume ``queue``, and return True. The listener is called when this channel gets the token.

        Return False if the queue does not exist; the channel has then ended.
        """
        ...

    async def leave(self, queue: str) -> None:
        """Stop consuming ``queue``. If this channel has the token, the broker delivers the token to the next
        consumer."""
        ...

    async def return_token(self, queue: str) -> None:
        """Return the token to the broker, but continue to consume. The broker redelivers it at once, as one more
        delivery."""
        ...

    async def take(self, queue: str) -> bool:
        """Declare ``queue`` as exclusive to this connection, and return True. The broker drops messages to this queue.

        Return False if another channel of this connection has the queue, or if another connection has it. In the second
        case, this channel has ended.
        """
        ...

    async def close(self) -> None:
        """Close the channel, and delete the queues that it declared with ``take``. Idempotent.

        The broker delivers the channel's tokens to the next consumers.
        """
        ...

    def abandon(self) -> None:
        """Begin to close a channel on which a call received no answer. The call does not wait until the channel is
        closed."""
        ...


class LockDriver(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether the connection is open. A closed connection is never opened again."""
        ...

    async def open(self, listener: LockListener) -> LockChannel:
        """Open a channel that reports its events to ``listener``."""
        ...


class LockConnection(Protocol):
    """A connection that is reopened after a loss, each time with a new driver."""

    async def start(self) -> None:
        """Connect. Raises: StartupError."""
        ...

    async def stop(self) -> None:
        """Disconnect, which releases all locks held over this connection. Idempotent, and safe before ``start``."""
        ...

    def driver(self) -> LockDriver:
        """Return the driver of the current connection. Raises: BrokerUnavailable while there is none."""
        ...
