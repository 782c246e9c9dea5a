"""Sends all calls of a process to Redis on one connection, which needs less work per call than a connection pool.

Theory of operation. If no calls are in progress, a new call is sent at once. Calls that arrive while others are in
progress wait until these are answered, and are then sent together. Redis answers calls in order. If the connection
fails, all calls that were sent on it fail. They are not sent again, because it is unknown whether Redis carried them
out. The next call opens a new connection.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from redis.exceptions import MaxConnectionsError, ReadOnlyError, RedisError, ResponseError

from popgate.adapters.redis.address import RedisAddress, close_pool, open_pool
from popgate.runtime.histogram import Histogram

Word = str | bytes | int

ANSWER_SECONDS = 2.0
"""Maximum number of seconds for one exchange: to connect if necessary, to send calls, and to receive all answers. After
this time the connection is closed, because it may be half-open. A call takes at most twice as long, because it may wait
for an earlier exchange."""
CLOSE_SECONDS = 1.0
WAITING_MAX = 4_096
"""Maximum number of calls that wait to be sent. Further calls fail: Redis is too slow, and callers must retry later."""

_CLOSED = "its connection was closed"
_Call = tuple[bytes, asyncio.Future[Any]]


class PipelinedConnection:
    """A connection to Redis that all calls share. The first call opens it. Use it within one event loop only.

    ``exchange_seconds``: how long the exchanges took in which Redis answered all calls.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._pool = open_pool(address)
        self._connection: Any = None  # redis-py's connection class has few types
        self._waiting: deque[_Call] = deque()
        self._sent: list[_Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._is_closed = False
        self.exchange_seconds = Histogram()

    async def call(self, *words: Word) -> Any:
        """Send a command and return Redis's answer. Texts in the answer are bytes.

        If the call is cancelled, Redis may still carry out the command.

        Raises: RedisError, or OSError, which includes TimeoutError. A ResponseError is an answer of Redis, which means
        that Redis has rejected the command.
        """
        if self._is_closed:
            raise ConnectionAbortedError(_CLOSED)
        if len(self._waiting) >= WAITING_MAX:
            raise MaxConnectionsError(f"{WAITING_MAX} calls wait already")
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((_packed(words), answered))
        if self._pump is None:
            self._begin()
        return await answered

    async def close(self) -> None:
        """Fail the waiting calls, and close the connection. Idempotent."""
        self._is_closed = True
        if (pump := self._pump) is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        await self._disconnect(wait=True)
        await close_pool(self._pool)

    def _begin(self) -> None:
        self._pump = asyncio.get_running_loop().create_task(self._exchange_all(), name="redis pipeline")
        self._pump.add_done_callback(self._ended)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        """Fail the waiting calls if the pump task failed or was cancelled. Otherwise start it again if calls wait."""
        self._pump = None
        if pump.cancelled() or pump.exception() is not None:
            self._give_up()
        elif self._waiting:
            self._begin()

    async def _exchange_all(self) -> None:
        try:
            while self._waiting:
                self._sent = [call for call in self._waiting if not call[1].done()]  # the others were cancelled
                self._waiting.clear()
                if self._sent:
                    await self._exchange(self._sent)
        except BaseException:
            await self._disconnect()
            raise

    def _give_up(self) -> None:
        _fail([*self._sent, *self._waiting], ConnectionAbortedError(_CLOSED))
        self._waiting.clear()

    async def _exchange(self, calls: list[_Call]) -> None:
        """Send ``calls`` together, and pass each answer to its caller."""
        is_replica, began = False, perf_counter()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self._connected()
                await connection.send_packed_command([packed for packed, _ in calls], check_health=False)
                for _, answered in calls:
                    try:
                        answer = await connection.read_response(disable_decoding=True)
                    except ResponseError as error:
                        is_replica |= isinstance(error, ReadOnlyError)
                        _fail([(b"", answered)], error)
                    else:
                        if not answered.done():
                            answered.set_result(answer)
            self.exchange_seconds.add(perf_counter() - began)
        except (RedisError, OSError) as error:
            await self._disconnect()
            _fail(calls, error)
        if is_replica:
            await self._disconnect()  # after a failover, the address leads to another server

    async def _connected(self) -> Any:
        connection = self._connection
        if connection is None:
            make_connection: Callable[[], Any] = self._pool.make_connection
            connection = self._connection = make_connection()
        elif connection.is_connected:
            # A connection that Redis has closed since the last exchange, for example because of a restart, is replaced
            # before anything is sent on it. redis-py before version 8 calls the method can_read_destructive.
            can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
            if await can_read():
                await connection.disconnect()
        await connection.connect()
        return connection

    async def _disconnect(self, *, wait: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):  # the connection is not used any more
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.disconnect(nowait=not wait)


def _fail(calls: list[_Call], error: RedisError | OSError) -> None:
    """Fail each call with its own copy of ``error``, because each caller adds a traceback to the exception."""
    for _, answered in calls:
        if not answered.done():
            answered.set_exception(type(error)(*error.args))


def _packed(words: tuple[Word, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)
