"""The lock driver over somebody's own aio-pika connection: plain channels beneath it, which nothing revives.

A lock that is lost with its channel must stay lost: a channel that came back by itself would hold it unnoticed.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aio_pika.abc import AbstractConnection
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.abc import AbstractConnection as PlainConnection
from aiormq.exceptions import (
    AMQPError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    PublishError,
)
from pamqp.common import FieldValue

from popgate.adapters.rabbitmq.session import NO_CHANNEL_LEFT, ChannelNumbers
from popgate.domain.errors import LockUnavailable
from popgate.ports.lock_driver import LockChannel, LockDriver, LockListener, QueueRole, QueueState, Token

ANSWER_SECONDS = 10.0
"""A broker that says nothing for so long is gone: a partition may leave a connection open for long."""
DELIVERY_LIMIT = 2**31 - 1
"""With a limit, however large, what is returned goes to the front of a quorum queue (RabbitMQ 3.10)."""
_ARGUMENTS: dict[QueueRole, dict[str, FieldValue]] = {
    QueueRole.TOKEN: {
        "x-queue-type": "quorum",
        "x-single-active-consumer": True,
        "x-delivery-limit": DELIVERY_LIMIT,
    },
    QueueRole.SLOT: {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "drop-head"},
    QueueRole.WAITING: {"x-queue-type": "quorum"},
}


class RabbitLockDriver:
    """Locks of one connection. An exclusive queue belongs to the connection, so who has it here is kept here."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._taken: set[str] = set()
        self._numbers = ChannelNumbers()

    @property
    def is_open(self) -> bool:
        return self._connection.transport is not None and not self._connection.is_closed

    async def open(self, listener: LockListener) -> LockChannel:
        return RabbitLockChannel(await self.plain_channel(), listener, self, self._taken)

    async def plain_channel(self) -> AbstractChannel:
        """Raises: LockUnavailable."""
        connection = self._plain_connection()
        with self._numbers.next(connection) as number:
            if number is None:
                raise LockUnavailable(NO_CHANNEL_LEFT)
            async with _translated("no channel could be opened"):
                channel = await connection.channel(channel_number=number, publisher_confirms=True)
                await channel.basic_qos(prefetch_count=1)
        return channel

    def _plain_connection(self) -> PlainConnection:
        transport = self._connection.transport
        if transport is None or not self.is_open:
            raise LockUnavailable("the connection to RabbitMQ is closed")
        return transport.connection


class RabbitLockChannel:
    def __init__(
        self, channel: AbstractChannel, listener: LockListener, driver: RabbitLockDriver, taken: set[str]
    ) -> None:
        self._channel = channel
        self._driver = driver
        self._listener = listener
        self._all_taken = taken
        self._taken: set[str] = set()
        self._tags: dict[str, int] = {}
        """The delivery tag of each token that is here, by queue."""
        self._closing = False
        self._close_task: asyncio.Task[None] | None = None
        channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        channel.closing.add_done_callback(self._on_closed)  # pyright: ignore[reportUnknownMemberType]  # a bare Future

    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None:
        arguments = dict(_ARGUMENTS[role])
        if kept_seconds is not None:
            arguments["x-expires"] = kept_seconds * 1000
        async with _translated(f"{queue} could not be declared"):
            await self._channel.queue_declare(queue, durable=True, arguments=arguments)

    async def delete(self, queue: str) -> None:
        async with _translated(f"{queue} could not be deleted"):
            await self._channel.queue_delete(queue)

    async def state(self, queue: str) -> QueueState | None:
        try:
            async with _translated(f"nothing is known of {queue}"):
                found = await self._channel.queue_declare(queue, passive=True)
        except _Missing:
            return None
        return QueueState(ready=found.message_count or 0, consumers=found.consumer_count or 0)

    async def put(self, queue: str, body: bytes) -> bool:
        try:
            async with _translated(f"nothing could be stored in {queue}"):
                await self._channel.basic_publish(
                    body,
                    routing_key=queue,
                    mandatory=True,
                    properties=spec.Basic.Properties(delivery_mode=2),
                )
        except PublishError:
            return False
        return True

    async def last(self, queue: str) -> bytes | None:
        async with _translated(f"nothing could be read from {queue}"):
            message = await self._channel.basic_get(queue)
            if not isinstance(message.delivery, spec.Basic.GetOk):
                return None
            await self._channel.basic_nack(message.delivery.delivery_tag or 0, requeue=True)
        return message.body

    async def wait_for_token(self, queue: str) -> bool:
        try:
            async with _translated(f"nobody can stand in line at {queue}"):
                await self._channel.basic_consume(queue, self._on_message, consumer_tag=queue)
        except _Missing:
            return False
        return True

    async def leave(self, queue: str) -> None:
        async with _translated(f"the line of {queue} could not be left"):
            await self._channel.basic_cancel(queue)
            tag = self._tags.pop(queue, None)
            if tag is not None:
                await self._channel.basic_nack(tag, requeue=True)

    async def turn_over(self, queue: str) -> None:
        tag = self._tags.pop(queue, None)
        if tag is not None:
            async with _translated(f"the token of {queue} could not be returned"):
                await self._channel.basic_nack(tag, requeue=True)

    async def take(self, queue: str) -> bool:
        if queue in self._all_taken:
            return False
        self._all_taken.add(queue)
        self._taken.add(queue)  # also where the answer is not waited for: ``close`` lets it go
        try:
            async with _translated(f"{queue} could not be declared"):
                await self._channel.queue_declare(queue, exclusive=True, arguments={"x-max-length": 0})
        except _Locked:
            self._all_taken.discard(queue)
            self._taken.discard(queue)
            return False
        return True

    async def close(self) -> None:
        # aiormq sends a second Channel.Close for one that is cancelled, and the broker ends the connection for it.
        self._closing = True
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close(), name="popgate lock channel close")
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        taken, self._taken = self._taken, set()
        try:
            channel = self._channel
            if taken and channel.is_closed and self._driver.is_open:
                channel = await self._driver.plain_channel()  # an exclusive queue outlives its channel
            if not channel.is_closed:
                async with _translated("the channel could not be closed"):
                    for queue in taken:
                        await channel.queue_delete(queue)
                    await channel.close()
        except _Locked:
            pass  # what it was about to take is somebody else's
        finally:
            self._all_taken -= taken

    # -- what the broker says by itself ---------------------------------------------------------------------------

    async def _on_message(self, message: DeliveredMessage) -> None:
        queue, tag = message.consumer_tag, message.delivery_tag
        assert queue is not None, "it was delivered to a consumer"
        assert tag is not None, "it was delivered"
        if self._closing:
            return
        self._tags[queue] = tag
        headers = message.header.properties.headers or {}
        count = headers.get("x-delivery-count", 0)
        self._listener.on_token(Token(queue, message.body, count if isinstance(count, int) else 0))

    def _on_cancelled(self, frame: spec.Basic.Cancel) -> None:
        self._end(f"{frame.consumer_tag} was deleted")

    def _on_closed(self, closing: "asyncio.Future[Any]") -> None:
        error = None if closing.cancelled() else closing.exception()
        if isinstance(error, ChannelNotFoundEntity | ChannelLockedResource):
            self._closing = True  # the answer to a question, for whoever asked
        self._end(f"its channel was closed{'' if error is None else f': {error}'}")

    def _end(self, reason: str) -> None:
        if not self._closing:
            self._closing = True
            self._listener.on_ended(reason)


class _Missing(Exception):
    """A queue that was asked about does not exist."""


class _Locked(Exception):
    """Another connection has the exclusive queue."""


@contextlib.asynccontextmanager
async def _translated(what: str) -> AsyncGenerator[None]:
    """Raises: LockUnavailable, _Missing, _Locked, PublishError."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except ChannelNotFoundEntity as error:
        raise _Missing from error
    except ChannelLockedResource as error:
        raise _Locked from error
    except PublishError:
        raise
    except TimeoutError as error:
        raise LockUnavailable(f"{what}: RabbitMQ did not answer for {ANSWER_SECONDS:g} s") from error
    except (AMQPError, OSError, RuntimeError) as error:
        raise LockUnavailable(f"{what}: {str(error) or type(error).__name__}") from error


_conforms: type[LockDriver] = RabbitLockDriver
_channel_conforms: type[LockChannel] = RabbitLockChannel
