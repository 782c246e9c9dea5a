"""Fetches the bodies of leased messages that are not here: for a repeated attempt, and for a rejection.

Owns the waiting. The queue hosts get the bodies: by a requeue if the channel holds the message, otherwise with the next
channel.
"""

import asyncio
from collections.abc import Callable, Sequence

from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState

WAIT_SECONDS_MAX = 5.0
ASK_SECONDS = 0.5
"""Seconds between two requests to open the queues: a queue that was closed a moment ago is not opened at once."""


class BodyRetrieval:
    """Fetches bodies; ``ask`` keeps the queues open and flowing meanwhile."""

    def __init__(self, group: ServedGroup, *, ask: Callable[[], None]) -> None:
        self._group = group
        self._ask = ask
        self._change: asyncio.Future[None] | None = None

    async def bring_back(self, many: Sequence[BufferedMessage]) -> bool:
        """Return True when all bodies are here, or can't come any more. Return False if that takes too long."""
        if not any(map(_is_missing, many)):
            return True

        def are_here() -> bool:
            missing = [buffered for buffered in many if _is_missing(buffered)]
            for buffered in missing:
                self._group.host(buffered).fetch_again([buffered])
            return not missing

        for buffered in many:  # also those that are here: their bodies must not be forgotten while the others arrive
            self._group.host(buffered).state.wanted.add(buffered)
        try:
            return await self.until(are_here)
        finally:
            for buffered in many:
                self._group.host(buffered).state.wanted.discard(buffered)

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Return True when ``holds`` does. It is called whenever messages have come. Return False if it takes too
        long."""
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while not holds():
                    self._ask()
                    if self._change is None:
                        self._change = asyncio.get_running_loop().create_future()
                    await asyncio.wait({self._change}, timeout=ASK_SECONDS)
        except TimeoutError:
            return False
        return True

    def changed(self) -> None:
        """Check the waiting calls again, because messages came, or may come now."""
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)


def _is_missing(buffered: BufferedMessage) -> bool:
    return buffered.message is None and buffered.state is not MessageState.DROPPED
