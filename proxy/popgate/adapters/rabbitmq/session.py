"""Manages one live connection to RabbitMQ, from its handshake to its end. The connection is never reopened.

aio-pika's robust connections are deliberately not used: they reopen channels silently, with delivery tags that start at
1 again (decision 17). When a session ends, it notifies its channels and its owner. A new connection is a new object.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter
from typing import Any, TypeVar, cast

import aio_pika
import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import (
    AMQPChannelError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
)
from yarl import URL

from popgate.adapters.rabbitmq.channel_parser import CloseReason
from popgate.adapters.rabbitmq.frame_interceptor import FRAME_OVERHEAD_BYTES, FrameInterceptor, InterceptorFactory
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.versions import Version, version_of
from popgate.domain.errors import BrokerUnavailable
from popgate.runtime.histogram import Histogram

T = TypeVar("T")

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
CHANNELS_MAX = 65_535
FRAME_BYTES_DEFAULT = 131_072
"""Bytes in a frame if the broker sets no limit."""
SILENT_HEARTBEATS, SILENT_LOOKS = 1.8, 36
"""Heartbeat intervals without any data after which a connection is considered lost, and the number of checks in this
time. RabbitMQ sends something twice in each interval, so three sends are missing by then. With the default interval of
5 s, a proxy leaves a hanging node after 9 s. RabbitMQ has another leader for the node's queues after 10 s."""

_CODES: dict[type[BaseException], int] = {
    ChannelAccessRefused: ACCESS_REFUSED,
    ChannelNotFoundEntity: NOT_FOUND,
    ChannelLockedResource: RESOURCE_LOCKED,
    ChannelPreconditionFailed: PRECONDITION_FAILED,
}


NO_CHANNEL_LEFT = "all channels of the connection are in use: raise RabbitMQ's channel_max"


class ChannelRefusedError(Exception):
    """The broker closed a channel because of a call on it."""

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class Session:
    """An open connection.

    `lost` is set when the connection has been lost or closed. `blocked` is the reason why the broker accepts no
    messages, or None if it accepts them. `server_version` is the version of the connection's node. It stays set after
    the session has ended. `call_seconds` counts how long answered calls took.
    """

    def __init__(
        self, options: RabbitOptions, on_blocked: Callable[[str | None], None], call_seconds: Histogram | None = None
    ) -> None:
        self._options = options
        self._on_blocked = on_blocked
        self._connection: aio_pika.Connection | None = None
        self._numbers = ChannelNumbers()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.call_seconds = call_seconds or Histogram()
        self.server_version: Version = ()
        self.blocked: str | None = None
        self.lost = asyncio.Event()
        self.interceptor = FrameInterceptor(on_end=lambda _: self.lost.set(), on_blocked=self._note_blocked)

    @classmethod
    async def connect(
        cls,
        options: RabbitOptions,
        url: URL,
        purpose: str,
        *,
        connect_seconds: float,
        on_blocked: Callable[[str | None], None] = lambda _: None,
        call_seconds: Histogram | None = None,
    ) -> "Session":
        """Open a connection to the node of `url`.

        Raises: ConnectionRefusedByBrokerError, or any error of aiormq and aio-pika. `startup.explain` translates these
        errors for an operator.
        """
        session = cls(options, on_blocked, call_seconds)
        name = f"popgate {options.role} {socket.gethostname()}:{os.getpid()} ({purpose})"
        connection = aio_pika.Connection(
            url.update_query(heartbeat=options.heartbeat_seconds),
            client_properties={"connection_name": name, "product": "popgate"},
        )
        connection.kwargs["transport_factory"] = InterceptorFactory(session.interceptor)
        try:
            await connection.connect(timeout=connect_seconds)
        except BaseException as error:
            session.interceptor.abort()
            await connection.close()
            if (
                isinstance(error, Exception)
                and session.interceptor.ended is not None
                and session.interceptor.ended.code
            ):
                raise ConnectionRefusedByBrokerError(session.interceptor.ended) from error
            raise
        session._connection = connection
        session.server_version = version_of(session._amqp)
        unlimit_write_queue(session._amqp)
        session.spawn(session._listen(), "popgate amqp heartbeats")
        # aiormq may end the connection itself, but the interceptor has usually noticed the loss long before.
        # aiormq declares a bare Future
        closing = cast("asyncio.Future[object]", session._amqp.closing)  # pyright: ignore[reportUnknownMemberType]
        closing.add_done_callback(session._note_closed)
        return session

    @property
    def _amqp(self) -> AbstractConnection:
        transport = self.connection.transport
        assert transport is not None
        return transport.connection

    @property
    def connection(self) -> aio_pika.Connection:
        assert self._connection is not None
        return self._connection

    @property
    def cluster_name(self) -> str:
        """Name of the RabbitMQ cluster; empty if RabbitMQ does not report it."""
        return str(self._amqp.server_properties.get("cluster_name") or "")

    @property
    def body_bytes_max(self) -> int:
        """Maximum number of bytes of a body in one frame."""
        return (self._amqp.connection_tune.frame_max or FRAME_BYTES_DEFAULT) - FRAME_OVERHEAD_BYTES

    @property
    def end_reason(self) -> str:
        return "" if self.interceptor.ended is None else self.interceptor.ended.text

    # ------------------------------------------------------------ channels and calls

    async def open_channel(self, *, confirms: bool = False, reserve: int = 0) -> AbstractChannel:
        """Open a channel. ``reserve`` channels must remain for other purposes. Raises: BrokerUnavailable."""
        self._check()
        with self._numbers.next(self._amqp, reserve) as number:
            if number is None:
                raise BrokerUnavailable(NO_CHANNEL_LEFT)
            try:
                return await self.call(self._amqp.channel(channel_number=number, publisher_confirms=confirms))
            except ChannelRefusedError as error:
                raise BrokerUnavailable(f"RabbitMQ does not open a channel: {error}") from error

    async def call(
        self, call: Coroutine[Any, Any, T], *, give_up: Callable[[], None] = lambda: None, timeout: float | None = None
    ) -> T:
        """Await one of aiormq's calls.

        If a call is cancelled or takes too long, its channel ends: aiormq closes the channel, because it could not
        distinguish the late answer from the next call's answer. `give_up` is called first, so that nothing more is
        written to the channel: a frame after Channel.Close would end the whole connection.

        Raises: ChannelRefusedError if the broker closes the channel because of the call; DeliveryError if the broker
        does not accept a published message; BrokerUnavailable.
        """
        task = self.spawn(call, "popgate amqp call")
        began = perf_counter()
        try:
            async with asyncio.timeout(timeout or self._options.reply_timeout_seconds):
                answer = await asyncio.shield(task)
            self.call_seconds.add(perf_counter() - began)
            return answer
        except DeliveryError:
            raise
        except AMQPChannelError as error:
            raise ChannelRefusedError(_close_reason(error)) from error
        except TimeoutError as error:
            give_up()
            task.cancel()
            raise BrokerUnavailable("RabbitMQ does not answer") from error
        except asyncio.CancelledError as error:
            if not task.done():
                give_up()
                task.cancel()
                raise
            # aiormq cancels waiting calls when it gives up a connection. In this case, the task of the caller was not
            # cancelled.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise BrokerUnavailable(self.end_reason or "the connection to RabbitMQ was lost") from error
        except Exception as error:  # aiormq raises RuntimeError, OSError, pamqp's errors and its own for a loss
            raise BrokerUnavailable(self.end_reason or f"the connection to RabbitMQ was lost: {error}") from error

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` as a task of this session. `close` cancels the task if it still runs."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def close_channel(self, channel: AbstractChannel) -> None:
        """Close a channel if it is open.

        This method never raises an error of the broker. If the caller is cancelled, the channel is closed anyway.

        The close runs in its own task: if it were cancelled, aiormq would send a second Channel.Close, and the broker
        would end the connection.
        """
        if channel.is_closed:
            return
        task = self.spawn(channel.close(), "popgate channel close")
        await asyncio.wait([task], timeout=self._options.reply_timeout_seconds)

    async def close(self) -> None:
        """End the connection, with a proper handshake if the broker answers soon. Never raises an error of the broker.

        A second call waits for the same end, even if the first call was cancelled.
        """
        if self._closing is None:
            self.interceptor.end(CloseReason(0, "popgate closed the connection"))
            self._closing = asyncio.create_task(self._close(), name="popgate connection close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        assert self._connection is not None
        closing = self.spawn(self._connection.close(), "popgate aio-pika close")
        for _ in range(2):
            done, _ = await asyncio.wait([closing], timeout=self._options.close_timeout_seconds)
            if done:
                break
            self.interceptor.abort()  # then the second round ends at once
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self) -> None:
        if self.interceptor.ended is not None:
            raise BrokerUnavailable(self.interceptor.ended.text)

    async def _listen(self) -> None:
        """End the session if no data arrives for 1.8 heartbeat intervals, because RabbitMQ hangs or its host is lost.

        aiormq waits for more than three intervals. This method counts checks, not seconds. So if this process was
        suspended, it reads the data that arrived in the meantime before the next check.
        """
        in_vain = 0
        while in_vain < SILENT_LOOKS and self.interceptor.ended is None:
            await asyncio.sleep(SILENT_HEARTBEATS * self._options.heartbeat_seconds / SILENT_LOOKS)
            in_vain = 0 if self.interceptor.was_heard() else in_vain + 1
        self.interceptor.end(CloseReason(0, "the connection to RabbitMQ was lost: no heartbeats arrived"))
        self.interceptor.abort()  # the broker would not answer a proper close

    def _note_blocked(self, reason: str | None) -> None:
        self.blocked = reason
        self._on_blocked(reason)

    def _note_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self.interceptor.end(CloseReason(0, f"the connection to RabbitMQ was lost: {error or 'no heartbeats arrived'}"))

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: an abandoned call has no caller that retrieves it


class ConnectionRefusedByBrokerError(Exception):
    """The broker refused the connection during the handshake, and reported a reason."""

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.text)
        self.reason = reason


def unlimit_write_queue(connection: AbstractConnection) -> None:
    """Remove the limit of aiormq's write queue, which is ten frames.

    When the queue is full, aiormq silently drops its confirmation that the broker closed a channel. The broker waits
    for this confirmation, and ends the connection when the channel's number is used again. Without the limit, the
    number of calls that wait for their answers bounds the queue.
    """
    frames: Any = getattr(connection, "write_queue")  # noqa: B009  # not in the abstract class
    frames._maxsize = 0


class ChannelNumbers:
    """Chooses the number of a connection's next channel. It uses the numbers in ascending order, then again from 1.

    aiormq would use the highest number in use plus one. If channels are opened and closed repeatedly, this exceeds the
    broker's maximum sooner or later, and the broker closes the connection. The broker also closes the connection if a
    number is used again too soon: when the broker closes a channel, aiormq frees the channel's number some moments
    before it confirms the end.
    """

    def __init__(self) -> None:
        self._latest = 0
        self._opening: set[int] = set()

    @contextlib.contextmanager
    def next(self, connection: AbstractConnection, reserve: int = 0) -> Generator[int | None]:
        """Yield a number that no channel uses, or None if no more than ``reserve`` numbers are free.

        No other channel gets this number while the block runs.
        """
        highest = connection.connection_tune.channel_max or CHANNELS_MAX
        used_count = len(self._opening.union(connection.channels)) if reserve else 0
        is_full = used_count + min(reserve, highest // 8) >= highest
        for step in range(0 if is_full else highest):
            number = (self._latest + step) % highest + 1
            if number not in connection.channels and number not in self._opening:
                break
        else:
            yield None
            return
        self._latest = number
        self._opening.add(number)
        try:
            yield number
        finally:
            self._opening.discard(number)


def _close_reason(error: AMQPChannelError) -> CloseReason:
    code = _CODES.get(type(error))
    if code is not None:
        return CloseReason(code, str(error.args[0]) if error.args else "")
    if isinstance(error, aiormq.exceptions.ChannelClosed) and len(error.args) == 2:
        return CloseReason(int(error.args[0] or 0), str(error.args[1] or "the channel was closed"))
    return CloseReason(0, str(error))
