"""One live connection to RabbitMQ, from its handshake to its end; it is never reopened.

Owns the connection, its channels' numbers, and the check that RabbitMQ still answers. A call is never cancelled while
it is under way: aiormq would close its channel, and a second close would end the whole connection. A new connection is
a new object.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import aiormq
from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    AMQPChannelError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from popgate_client.amqp.frames import ReadableTransport
from popgate_client.errors import BrokerUnavailable, PopgateError, Unauthorized

T = TypeVar("T")

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
HEARTBEAT_SECONDS = 5
CONNECT_SECONDS = 10.0
REPLY_SECONDS = 15.0
PULSE_SECONDS = 2.0
CLOSE_SECONDS = 1.0
CHANNELS_MAX = 2_047
"""Maximum number of channels if the broker sets no limit."""
NO_CHANNEL_LEFT = "all channels of the connection are in use: raise RabbitMQ's channel_max"
_CODES: dict[type[BaseException], int] = {
    ChannelAccessRefused: ACCESS_REFUSED,
    ChannelNotFoundEntity: NOT_FOUND,
    ChannelLockedResource: RESOURCE_LOCKED,
    ChannelPreconditionFailed: PRECONDITION_FAILED,
}


class ChannelRefused(Exception):
    """The broker closed a channel because of a call on it. `code` is AMQP's, 0 if there is none."""

    def __init__(self, error: AMQPChannelError) -> None:
        self.code = _CODES.get(type(error), 0)
        self.text = str(error.args[-1]) if error.args else str(error)
        super().__init__(self.text)


class Session:
    """An opened connection. `lost` is set when it can carry nothing more; `reason` then says why."""

    def __init__(self, connection: aiormq.Connection) -> None:
        self._connection = connection
        self._tasks: set[asyncio.Task[Any]] = set()
        self._latest_number = 0
        self._opening: set[int] = set()
        self._answered_at = asyncio.get_running_loop().time()
        self._pulse: AbstractChannel | None = None
        self.lost = asyncio.Event()
        self.reason = ""

    @classmethod
    async def connect(cls, url: URL, name: str) -> "Session":
        """Connect as `name`, which RabbitMQ's management interface shows.

        Raises: BrokerUnavailable; Unauthorized if RabbitMQ rejects the user.
        """
        connection = aiormq.Connection(
            url.update_query(heartbeat=HEARTBEAT_SECONDS), transport_factory=ReadableTransport()
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connect = cast(Any, connection).connect
                await connect(client_properties={"connection_name": name, "product": "popgate"})
        except Exception as error:  # aiormq raises its own errors, OSError, TimeoutError and more
            with contextlib.suppress(Exception):
                await connection.close()
            raise _no_connection(url, error) from error
        # Remove the limit of aiormq's write queue, which is ten frames. When it is full, aiormq silently drops its
        # confirmation that the broker closed a channel.
        cast(Any, connection).write_queue._maxsize = 0
        session = cls(connection)
        cast(Any, connection).closing.add_done_callback(session._note_closed)
        session._pulse = await session.open_channel()
        session.spawn(session._listen(), "popgate amqp pulse")
        return session

    @property
    def server_version(self) -> tuple[int, ...]:
        """The version of the node: major, minor and patch, as far as they are numbers."""
        text = str(self._connection.server_properties.get("version", ""))
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that RabbitMQ accepts; 0: no limit."""
        return self._connection.connection_tune.frame_max or 0

    async def open_channel(self, *, confirms: bool = False) -> AbstractChannel:
        """Open a channel. Raises: BrokerUnavailable."""
        number = self._next_number()
        self._opening.add(number)
        try:
            return await self.call(self._connection.channel(channel_number=number, publisher_confirms=confirms))
        except ChannelRefused as error:
            raise BrokerUnavailable("broker_unavailable", f"RabbitMQ does not open a channel: {error}") from error
        finally:
            self._opening.discard(number)

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await one of aiormq's calls; it runs on if the caller is cancelled.

        Raises: ChannelRefused if the broker closes the channel because of it; DeliveryError if it does not accept a
        published message; BrokerUnavailable. If no answer comes, the session ends.
        """
        task = self.spawn(call, "popgate amqp call")
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                return await asyncio.shield(task)
        except DeliveryError:
            raise
        except AMQPChannelError as error:
            raise ChannelRefused(error) from error
        except TimeoutError as error:
            self.end("RabbitMQ does not answer")
            raise self._lost() from error
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if not task.done() or (current is not None and current.cancelling()):
                raise
            raise self._lost() from error  # aiormq cancels waiting calls when it gives up a connection
        except Exception as error:  # aiormq raises RuntimeError, OSError, pamqp's errors and its own
            raise self._lost(error) from error

    async def close_channel(self, channel: AbstractChannel) -> None:
        """Close a channel if it is open. Never raises an error of the broker; a cancellation does not stop it."""
        if not channel.is_closed:
            await asyncio.wait([self.spawn(channel.close(), "popgate channel close")], timeout=REPLY_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` as a task of this session; `close` cancels it if it still runs."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def prove_alive(self) -> None:
        """Return at once if RabbitMQ has answered recently; otherwise ask it, and return when it answers.

        A process that was suspended does not notice it, and still finds messages that arrived before; meanwhile
        RabbitMQ may have redelivered them to other consumers. Raises: BrokerUnavailable.
        """
        if asyncio.get_running_loop().time() - self._answered_at > HEARTBEAT_SECONDS:
            await self._ask()

    def end(self, reason: str) -> None:
        """End the session: the connection counts as lost from now on."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()

    async def close(self) -> None:
        """End the connection, properly if the broker answers soon. Never raises an error of the broker."""
        self.end("the connection was closed")
        closing = asyncio.create_task(self._connection.close(), name="popgate connection close")
        await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        tasks = [closing, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        with contextlib.suppress(BrokerUnavailable, ChannelRefused):
            while not self.lost.is_set():
                await asyncio.sleep(PULSE_SECONDS)
                await self._ask()
        self.end("the connection to RabbitMQ was lost")

    async def _ask(self) -> None:
        if self._pulse is not None:
            asked_at = asyncio.get_running_loop().time()
            await self.call(self._pulse.basic_qos(prefetch_count=1))
            self._answered_at = asked_at

    def _next_number(self) -> int:
        # Numbers are used in turn: RabbitMQ ends the connection if one is used again before it knows that it is free.
        highest = self._connection.connection_tune.channel_max or CHANNELS_MAX
        for step in range(highest):
            number = (self._latest_number + step) % highest + 1
            if number not in self._connection.channels and number not in self._opening:
                self._latest_number = number
                return number
        raise BrokerUnavailable("broker_unavailable", NO_CHANNEL_LEFT)

    def _lost(self, error: Exception | None = None) -> BrokerUnavailable:
        reason = self.reason or f"the connection to RabbitMQ was lost{f': {error}' if error else ''}"
        return BrokerUnavailable("broker_unavailable", reason)

    def _note_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        self.end(f"the connection to RabbitMQ was lost: {error or 'it was closed'}")

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: an abandoned call has no caller that does


def _no_connection(url: URL, error: Exception) -> PopgateError:
    where = f"RabbitMQ at {url.host}:{url.port or ''}"
    if isinstance(error, AuthenticationError | ProbableAuthenticationError):
        return Unauthorized(
            "unauthorized", f"{where} refused the user {url.user!r}: check user and password in amqp_url"
        )
    reason = str(error) or type(error).__name__
    if isinstance(error, InvalidFrameError):  # it does not contain RabbitMQ's reason
        vhost = url.path[1:].replace("%2F", "/") or "/"
        reason = f"it refused the virtual host {vhost!r}: it may not exist, or the user may have no access to it"
    return BrokerUnavailable("broker_unavailable", f"no connection to {where}: {reason}")
