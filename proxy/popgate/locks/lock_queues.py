"""Observes the queues of a lock: ``Probe`` queries them, and ``TokenListener`` receives token messages from them."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from popgate.domain.errors import LockUnavailable
from popgate.ports.lock_driver import LockChannel, LockDriver, LockListener, QueueState, Token


class TokenListener:
    """Receives the events of one channel, and passes them to the waiting task.

    After ``forward_to``, it passes all events to another listener.
    """

    def __init__(self) -> None:
        self._heir: LockListener | None = None
        self._tokens: deque[Token] = deque()
        self._ended: str | None = None
        self._changed = asyncio.Event()

    async def token(self, seconds: float) -> Token | None:
        """Return the next token, or None if no token arrives within ``seconds``.

        Raises: LockUnavailable if the channel has ended.
        """
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
        """Discard the received tokens of ``queue``, because the client no longer waits for this queue.

        The client has already returned the token messages to the broker.
        """
        self._tokens = deque(token for token in self._tokens if token.queue != queue)

    def forward_to(self, heir: LockListener) -> None:
        """Pass all further events to ``heir``, and at once those that no task has received.

        A token among them is a second one: the broker has taken the first one away from this client meanwhile.
        """
        self._heir = heir
        while self._tokens:
            heir.on_token(self._tokens.popleft())
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
    """Queries queues on a channel of its own, which it opens when the channel is needed.

    If a query makes the broker close the channel, the next query opens another channel.
    """

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
        """Abandon the channel without waiting for the broker. The next query opens another channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def channel(self) -> LockChannel:
        if self._channel is None:
            self._listener = TokenListener()
            self._channel = await self._driver.open(self._listener)
        return self._channel

    def forwarded(self) -> tuple[LockChannel, TokenListener]:
        """Transfer the ownership of the channel to a grant. Return the channel and its listener."""
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
        """Return the last message of a queue. Return None if the queue does not exist or no message could be read."""
        body = await (await self.channel()).last(queue)
        if body is None:
            self.forget()
        return body
