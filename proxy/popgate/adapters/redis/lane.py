"""One connection to Redis that all calls of a process share: less work a call than a pool of them, and one that ends.

Owns the connection and who waits for what. Theory of operation: what is called while nothing is under way goes out at
once; what is called meanwhile waits for the answers to that, and then goes out together. Redis answers in the order it
was asked. A connection that fails takes along what was sent on it: whether that was done nobody knows, so nothing is
sent twice. The next call connects anew.
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
"""A connection that is silent that long is given up, be it in connecting: half-open ones stay no longer. So a call
takes no longer than twice that, with its wait for what was under way."""
CLOSE_SECONDS = 1.0
WAITING_MAX = 4_096
"""Beyond that many waiting calls, one is told to come back: Redis is slower than its callers."""

_CLOSED = "its connection was closed"
_Call = tuple[bytes, asyncio.Future[Any]]


class Lane:
    """Not connected before the first call. Used within one event loop."""

    def __init__(self, address: RedisAddress) -> None:
        self._pool = open_pool(address)
        self._connection: Any = None  # redis-py's class of it has few types
        self._waiting: deque[_Call] = deque()
        self._sent: list[_Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._is_closed = False

    async def call(self, *words: Word) -> Any:
        """What Redis answers to a command, as bytes. A call that is cancelled may be done nevertheless.

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
        """Fail what waits, and close the connection. Idempotent."""
        self._is_closed = True
        if (pump := self._pump) is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        await self._disconnect(wait=True)
        await close_pool(self._pool)

    def _begin(self) -> None:
        self._pump = asyncio.get_running_loop().create_task(self._exchange_all(), name="redis lane")
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
                self._sent = [call for call in self._waiting if not call[1].done()]  # others have no waiter any more
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
            await self._disconnect()  # after a failover its name leads to another one

    async def _connected(self) -> Any:
        connection = self._connection
        if connection is None:
            make_connection: Callable[[], Any] = self._pool.make_connection
            connection = self._connection = make_connection()
        elif connection.is_connected:
            # One that was closed meanwhile, as by a restart, is replaced before anything is sent on it. The second name
            # is that of redis-py before version 8.
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
    """Each waiter gets an exception of its own: each adds its own trace to it."""
    for _, answered in calls:
        if not answered.done():
            answered.set_exception(type(error)(*error.args))


def _packed(words: tuple[Word, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)
