"""The two ways in which a client looks at a lock: asking about its queues, and standing in their lines."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from popgate.domain.errors import LockUnavailable
from popgate.ports.lock_driver import LockChannel, LockDriver, LockListener, QueueState, Token


class Line:
    """Hears of tokens on one channel, and hands them to whoever waits; then to an heir."""

    def __init__(self) -> None:
        self._heir: LockListener | None = None
        self._tokens: deque[Token] = deque()
        self._ended: str | None = None
        self._changed = asyncio.Event()

    async def token(self, seconds: float) -> Token | None:
        """The next token, or None where none comes in time. Raises: LockUnavailable, where the channel has ended."""
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
        """Its line was left: a token of it that came before is given back already."""
        self._tokens = deque(token for token in self._tokens if token.queue != queue)

    def pass_to(self, heir: LockListener) -> None:
        """From now on ``heir`` hears it all."""
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
    """A channel for questions, opened when it is needed, and again after a question whose answer has ended it."""

    def __init__(self, driver: LockDriver) -> None:
        self._driver = driver
        self._channel: LockChannel | None = None
        self._line = Line()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def forget(self) -> None:
        """A question was not answered: ask the next one on another channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def channel(self) -> LockChannel:
        if self._channel is None:
            self._line = Line()
            self._channel = await self._driver.open(self._line)
        return self._channel

    def passed_on(self) -> tuple[LockChannel, Line]:
        """The channel is a grant's from now on."""
        channel, self._channel = self._channel, None
        assert channel is not None, "the lock was taken on it"
        return channel, self._line

    async def state(self, queue: str) -> QueueState | None:
        """None: there is no such queue."""
        state = await (await self.channel()).state(queue)
        if state is None:
            self._channel = None
        return state

    async def last(self, queue: str) -> bytes | None:
        """None: there is no such queue, or nothing to read in it."""
        body = await (await self.channel()).last(queue)
        if body is None:
            self.forget()
        return body
