"""Implements the lock driver over the caller's aio-pika connection.

It uses aiormq's plain channels, which are never reopened. When a channel ends, its lock is lost and must stay lost. If
the channel were reopened automatically, the lock would still appear to be held.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from aio_pika.abc import AbstractConnection, AbstractRobustConnection
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.abc import AbstractConnection as PlainConnection
from aiormq.exceptions import (
    AMQPError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    DeliveryError,
    PublishError,
)
from pamqp.common import FieldValue

from popgate.adapters.rabbitmq.session import NO_CHANNEL_LEFT, ChannelNumbers, unlimit_write_queue
from popgate.adapters.rabbitmq.versions import (
    DISCONNECTED_MILLISECONDS,
    DISCONNECTED_TIMEOUT,
    Version,
    count_header,
    version_of,
    waits_for_lost_nodes,
)
from popgate.domain.errors import LockUnavailable
from popgate.ports.lock_driver import (
    LockChannel,
    LockDriver,
    LockListener,
    NotStoredError,
    QueueRole,
    QueueState,
    Token,
)

ANSWER_SECONDS = 10.0
"""Maximum number of seconds to wait for an answer. After this time the broker is considered lost: during a partition, a
dead connection may stay open for long."""
LEFT_SECONDS = 1.0
"""Maximum number of seconds for which the end of a channel waits for the channel's open calls."""
DELIVERY_LIMIT = 2**31 - 1
"""Delivery limit of token and holder queues. With any limit, however large, RabbitMQ 3.10 puts returned messages at the
front of a quorum queue. So an earlier holder's message that is returned after a read does not replace the present
holder's message. Without a limit, RabbitMQ 4 applies a limit of 20."""
_LOST_NODE = {DISCONNECTED_TIMEOUT: DISCONNECTED_MILLISECONDS}
"""Argument of token queues that limits how long a holder keeps the token after the loss of the holder's node."""
_ARGUMENTS: dict[QueueRole, dict[str, FieldValue]] = {
    QueueRole.TOKEN: {
        "x-queue-type": "quorum",
        "x-single-active-consumer": True,
        "x-delivery-limit": DELIVERY_LIMIT,
    },
    QueueRole.SLOT: {"x-queue-type": "quorum"},
    QueueRole.HOLDER: {
        "x-queue-type": "quorum",
        "x-max-length": 1,
        "x-overflow": "drop-head",
        "x-delivery-limit": DELIVERY_LIMIT,
    },
    QueueRole.WAITING: {"x-queue-type": "quorum"},
}

T = TypeVar("T")


class RabbitLockDriver:
    """Opens channels for locks on one connection.

    It records the exclusive queues that its channels have declared, because RabbitMQ lets every channel of the same
    connection use them.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._taken: set[str] = set()
        self._numbers = ChannelNumbers()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        """Return whether the connection is usable.

        aio-pika reports a lost connection as open until its owner closes it.
        """
        transport = self._connection.transport
        if transport is None or self._connection.is_closed:
            return False
        return isinstance(self._connection, AbstractRobustConnection) or not transport.connection.is_closed

    async def open(self, listener: LockListener) -> LockChannel:
        channel = await self.plain_channel()
        return RabbitLockChannel(channel, listener, self, self._taken, version_of(self._plain_connection()))

    async def plain_channel(self) -> AbstractChannel:
        """Open a channel that is never reopened. Raises: LockUnavailable."""
        connection = self._plain_connection()
        unlimit_write_queue(connection)
        with self._numbers.next(connection) as number:
            if number is None:
                raise LockUnavailable(NO_CHANNEL_LEFT)
            opening = self.spawn(connection.channel(channel_number=number, publisher_confirms=True))
            try:
                return await self.answer("no channel could be opened", opening)
            except asyncio.CancelledError:
                opening.add_done_callback(self._close_unwanted)
                raise

    async def call(self, what: str, call: Awaitable[T]) -> T:
        """Await one of aiormq's calls, and return its answer.

        Raises: LockUnavailable, MissingError, LockedError, PublishError.
        """
        return await self.answer(what, self.spawn(call))

    def _plain_connection(self) -> PlainConnection:
        transport = self._connection.transport
        if transport is None or not self.is_open:
            raise LockUnavailable("the connection to RabbitMQ is closed")
        return transport.connection

    def spawn(self, call: Awaitable[T]) -> "asyncio.Task[T]":
        """Run ``call`` to its end, even if its caller is cancelled."""
        task = asyncio.create_task(_answered(call), name="popgate lock call")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def answer(self, what: str, task: "asyncio.Task[T]") -> T:
        """Wait for the answer of ``task``.

        If the caller is cancelled, the task continues. If the task were cancelled, aiormq would close the channel while
        the channel's frames are in flight, and a frame after a Channel.Close ends the connection with all its locks.

        Raises: LockUnavailable, MissingError, LockedError, NotStoredError, PublishError.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.shield(task)
        except ChannelNotFoundEntity as error:
            raise MissingError(f"{what}: there is no such queue") from error
        except ChannelLockedResource as error:
            raise LockedError(f"{what}: another connection has it") from error
        except PublishError:
            raise
        except DeliveryError as error:
            raise NotStoredError(f"{what}: RabbitMQ has refused it") from error
        except TimeoutError as error:
            task.cancel()
            raise LockUnavailable(f"{what}: RabbitMQ did not answer for {ANSWER_SECONDS:g} s") from error
        except asyncio.CancelledError as error:
            # aiormq cancels waiting calls when it gives up a connection. In this case, the task of the caller was not
            # cancelled.
            current = asyncio.current_task()
            if not task.cancelled() or (current is not None and current.cancelling()):
                raise
            raise LockUnavailable(f"{what}: the connection to RabbitMQ was lost") from error
        except (AMQPError, OSError, RuntimeError) as error:
            raise LockUnavailable(f"{what}: {str(error) or type(error).__name__}") from error

    def _close_unwanted(self, opening: "asyncio.Task[AbstractChannel]") -> None:
        """Close a channel whose caller was cancelled while the channel was being opened."""
        if not opening.cancelled() and opening.exception() is None:
            self.spawn(opening.result().close())

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; a waiting caller receives it, too


async def _answered(call: Awaitable[T]) -> T:
    return await call


class RabbitLockChannel:
    def __init__(
        self,
        channel: AbstractChannel,
        listener: LockListener,
        driver: RabbitLockDriver,
        taken: set[str],
        version: Version,
    ) -> None:
        self._channel = channel
        self._driver = driver
        self._listener = listener
        self._all_taken = taken
        self._version = version
        self._taken: set[str] = set()
        self._is_limited = False
        self._tags: dict[str, int] = {}
        """The delivery tag of each received token, by queue."""
        self._closing = False
        self._close_task: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Task[Any]] = set()
        channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
        channel.closing.add_done_callback(self._on_closed)  # pyright: ignore[reportUnknownMemberType]  # a bare Future

    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None:
        arguments = dict(_ARGUMENTS[role])
        if role is QueueRole.TOKEN and waits_for_lost_nodes(self._version):
            arguments |= _LOST_NODE
        if kept_seconds is not None:
            arguments["x-expires"] = kept_seconds * 1000
        await self._call(
            f"{queue} could not be declared", self._channel.queue_declare(queue, durable=True, arguments=arguments)
        )

    async def delete(self, queue: str) -> None:
        await self._call(f"{queue} could not be deleted", self._channel.queue_delete(queue))

    async def state(self, queue: str) -> QueueState | None:
        try:
            found = await self._call(
                f"the state of {queue} could not be read", self._channel.queue_declare(queue, passive=True)
            )
        except MissingError:
            return None
        return QueueState(ready=found.message_count or 0, consumers=found.consumer_count or 0)

    async def put(self, queue: str, body: bytes) -> bool:
        properties = spec.Basic.Properties(delivery_mode=2)
        publish = self._channel.basic_publish(body, routing_key=queue, mandatory=True, properties=properties)
        try:
            await self._call(f"nothing could be stored in {queue}", publish)
        except PublishError:
            return False
        return True

    async def last(self, queue: str) -> bytes | None:
        what = f"nothing could be read from {queue}"
        try:
            message = await self._call(what, self._channel.basic_get(queue))
        except MissingError:
            return None
        if not isinstance(message.delivery, spec.Basic.GetOk):
            return None
        await self._call(what, self._channel.basic_nack(message.delivery.delivery_tag or 0, requeue=True))
        return message.body

    async def wait_for_token(self, queue: str) -> bool:
        what = f"the token of {queue} could not be waited for"
        if not self._is_limited:
            await self._call(what, self._channel.basic_qos(prefetch_count=1))
            self._is_limited = True
        try:
            await self._call(what, self._channel.basic_consume(queue, self._on_message, consumer_tag=queue))
        except MissingError:
            return False
        return True

    async def leave(self, queue: str) -> None:
        what = f"the wait for the token of {queue} could not be ended"
        await self._call(what, self._channel.basic_cancel(queue))
        tag = self._tags.pop(queue, None)
        if tag is not None:
            await self._call(what, self._channel.basic_nack(tag, requeue=True))

    async def return_token(self, queue: str) -> None:
        tag = self._tags.pop(queue, None)
        if tag is not None:
            await self._call(f"the token of {queue} could not be returned", self._channel.basic_nack(tag, requeue=True))

    async def take(self, queue: str) -> bool:
        if queue in self._all_taken:
            return False
        self._all_taken.add(queue)
        self._taken.add(queue)  # even if the caller is cancelled, so that ``close`` deletes the queue
        declare = self._channel.queue_declare(queue, exclusive=True, arguments={"x-max-length": 0})
        try:
            await self._call(f"{queue} could not be declared", declare)
        except LockedError:
            self._all_taken.discard(queue)
            self._taken.discard(queue)
            return False
        return True

    async def close(self) -> None:
        await asyncio.shield(self._close_soon())

    def abandon(self) -> None:
        self._close_soon()

    def _close_soon(self) -> "asyncio.Task[None]":
        self._closing = True
        if self._close_task is None:
            self._close_task = self._driver.spawn(self._close())
        return self._close_task

    async def _close(self) -> None:
        taken, self._taken = self._taken, set()
        what = "the channel could not be closed"
        try:
            await self._end_questions()
            channel = self._channel
            if taken and channel.is_closed and self._driver.is_open:
                channel = await self._driver.plain_channel()  # an exclusive queue outlives its channel
            if not channel.is_closed:
                for queue in taken:
                    await self._driver.call(what, channel.queue_delete(queue))
                await self._driver.call(what, channel.close())
        except LockedError:
            pass  # another connection has the queue that this channel was about to take
        finally:
            self._all_taken -= taken

    async def _end_questions(self) -> None:
        """Wait for open calls for up to ``LEFT_SECONDS``, then cancel the calls that are still open.

        aiormq can close a channel only if no call is open on it, and does not report a failure to close. The broker
        would then still treat the channel as the holder of its token. Cancelling a call closes the channel at once.
        """
        if self._asked:
            await asyncio.wait(self._asked, timeout=LEFT_SECONDS)
        for question in list(self._asked):
            question.cancel()
        if self._asked:
            await asyncio.wait(self._asked)

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        question = self._driver.spawn(call)
        self._asked.add(question)
        question.add_done_callback(self._asked.discard)
        return await self._driver.answer(what, question)

    # -- events that the broker sends unasked -----------------------------------------------------------------------

    async def _on_message(self, message: DeliveredMessage) -> None:
        queue, tag = message.consumer_tag, message.delivery_tag
        assert queue is not None, "it was delivered to a consumer"
        assert tag is not None, "it was delivered"
        if self._closing:
            return
        self._tags[queue] = tag
        headers = message.header.properties.headers or {}
        count = headers.get(count_header(self._version), 0)
        self._listener.on_token(Token(queue, message.body, count if isinstance(count, int) else 0))

    def _on_cancelled(self, frame: spec.Basic.Cancel) -> None:
        self._end(f"{frame.consumer_tag} was deleted")

    def _on_closed(self, closing: "asyncio.Future[Any]") -> None:
        error = None if closing.cancelled() else closing.exception()
        if isinstance(error, ChannelNotFoundEntity | ChannelLockedResource):
            self._closing = True  # this is the answer to a call, and the caller receives it
        self._end(f"its channel was closed{'' if error is None else f': {error}'}")

    def _end(self, reason: str) -> None:
        if not self._closing:
            self._closing = True
            self._listener.on_ended(reason)


class MissingError(LockUnavailable):
    """The queue does not exist. For a call that requires the queue, this means that the lock is unavailable."""


class LockedError(LockUnavailable):
    """Another connection has declared this exclusive queue."""


_conforms: type[LockDriver] = RabbitLockDriver
_channel_conforms: type[LockChannel] = RabbitLockChannel
