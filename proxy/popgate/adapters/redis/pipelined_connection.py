"""One connection to Redis that all calls of a process share: less work per call than a pool, and a clear end.

Owns the connection and the waiting calls. Theory of operation: calls that arrive while nothing is in progress are sent
at once. Calls that arrive meanwhile wait for the answers, and are then sent together. Redis answers in order. If a
connection fails, all calls sent on it fail: it is unknown whether they were done, so nothing is sent twice. The next
call connects again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import MaxConnectionsError, ReadOnlyError, RedisError, ResponseError

from popgate.adapters.redis.address import RedisAddress, close_pool, open_pool

Word = str | bytes | int

ANSWER_SECONDS = 2.0
"""Seconds without an answer after which a connection is given up, even while it connects, so that half-open ones do not
stay. A call takes at most twice as long, because it may wait for an earlier exchange."""
CLOSE_SECONDS = 1.0
WAITING_MAX = 4_096
"""Maximum number of waiting calls. Beyond it callers must retry later, because Redis is slower than its callers."""

_CLOSED = "its connection was closed"
_Call = tuple[bytes, asyncio.Future[Any]]


class PipelinedConnection:
    """One connection, made by the first call. Used within one event loop."""

    def __init__(self, address: RedisAddress) -> None:
        self._pool = open_pool(address)
        self._connection: Any = None  # redis-py's class of it has few types
        self._waiting: deque[_Call] = deque()
        self._sent: list[_Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._is_closed = False

    async def call(self, *words: Word) -> Any:
        """Return Redis's answer to a command, as bytes. A cancelled call may still be done.

        Raises: RedisError, or OSError, of which a TimeoutError is one. A ResponseError is an answer: nothing was done.
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
        """Fail the calls that wait if the pump has failed: no exchange comes for them."""
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
        """Send ``calls`` together and hand out the answers."""
        is_replica = False
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
        except (RedisError, OSError) as error:
            await self._disconnect()
            _fail(calls, error)
        if is_replica:
            await self._disconnect()  # after a failover its name leads to another server

    async def _connected(self) -> Any:
        connection = self._connection
        if connection is None:
            make_connection: Callable[[], Any] = self._pool.make_connection
            connection = self._connection = make_connection()
        elif connection.is_connected:
            # A connection that was closed meanwhile, for example by a restart, is replaced before anything is sent on
            # it. redis-py before version 8 has the second name.
            can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
            if await can_read():
                await connection.disconnect()
        await connection.connect()
        return connection

    async def _disconnect(self, *, wait: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):  # it is given up anyway
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.disconnect(nowait=not wait)


def _fail(calls: list[_Call], error: RedisError | OSError) -> None:
    """Fail each caller with an exception of its own, because each adds its own trace."""
    for _, answered in calls:
        if not answered.done():
            answered.set_exception(type(error)(*error.args))


def _packed(words: tuple[Word, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)
