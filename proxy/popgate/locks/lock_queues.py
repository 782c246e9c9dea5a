"""Two ways to observe a lock: ``Probe`` queries its queues, and ``TokenListener`` waits for tokens from them."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from popgate.domain.errors import LockUnavailable
from popgate.ports.lock_driver import LockChannel, LockDriver, LockListener, QueueState, Token


class TokenListener:
    """Receives the tokens of one channel, and hands them to the waiting task or, after ``forward_to``, to an heir."""

    def __init__(self) -> None:
        self._heir: LockListener | None = None
        self._tokens: deque[Token] = deque()
        self._ended: str | None = None
        self._changed = asyncio.Event()

    async def token(self, seconds: float) -> Token | None:
        """Return the next token, or None if none arrives in time. Raises: LockUnavailable if the channel has ended."""
        try:
            async with asyncio.timeout(seconds):
                while not self._tokens:
                    if self._ended is not None:
                        raise LockUnavailable(self._ended)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._tokens.popleft()

    def left(self, queue: str) -> None:
        """Discard the tokens of a queue whose line the client has left. These tokens have already been returned."""
        self._tokens = deque(token for token in self._tokens if token.queue != queue)

    def forward_to(self, heir: LockListener) -> None:
        """Send all further events to ``heir``."""
        self._heir = heir
        if self._ended is not None:
            heir.on_ended(self._ended)

    def on_token(self, token: Token) -> None:
        if self._heir is not None:
            self._heir.on_token(token)
            return
        self._tokens.append(token)
        self._changed.set()

    def on_ended(self, reason: str) -> None:
        if self._heir is not None:
            self._heir.on_ended(reason)
            return
        self._ended = reason
        self._changed.set()


class Probe:
    """A channel for queries. It is opened when it is needed. If a query ends it, the next query opens another one."""

    def __init__(self, driver: LockDriver) -> None:
        self._driver = driver
        self._channel: LockChannel | None = None
        self._listener = TokenListener()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def forget(self) -> None:
        """Abandon the channel, because a query on it was not answered. The next query opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def channel(self) -> LockChannel:
        if self._channel is None:
            self._listener = TokenListener()
            self._channel = await self._driver.open(self._listener)
        return self._channel

    def forwarded(self) -> tuple[LockChannel, TokenListener]:
        """Transfer the channel to a grant."""
        channel, self._channel = self._channel, None
        assert channel is not None, "the lock was taken on it"
        return channel, self._listener

    async def state(self, queue: str) -> QueueState | None:
        """Return the state of a queue, or None if it does not exist."""
        state = await (await self.channel()).state(queue)
        if state is None:
            self._channel = None
        return state

    async def last(self, queue: str) -> bytes | None:
        """Return the last message of a queue, or None if the queue does not exist or is empty."""
        body = await (await self.channel()).last(queue)
        if body is None:
            self.forget()
        return body
