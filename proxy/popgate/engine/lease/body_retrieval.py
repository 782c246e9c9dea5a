"""Fetches the bodies of leased messages that are not here: for a repeated attempt, and for a rejection.

Owns the waiting. The queue hosts fetch the bodies. If the channel holds a message, its host requeues the message.
Otherwise the body arrives with the next channel.
"""

import asyncio
from collections.abc import Callable, Sequence

from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState

WAIT_SECONDS_MAX = 5.0
ASK_SECONDS = 0.5
"""Seconds between two requests to open the queues. A queue that was just closed is not reopened at once."""


class BodyRetrieval:
    """Fetches bodies. During the wait, ``ask`` keeps the queues open and the messages flowing."""

    def __init__(self, group: ServedGroup, *, ask: Callable[[], None]) -> None:
        self._group = group
        self._ask = ask
        self._change: asyncio.Future[None] | None = None

    async def bring_back(self, many: Sequence[BufferedMessage]) -> bool:
        """Return True when each body is here or its message was dropped. Return False if that takes too long."""
        if not any(map(_is_missing, many)):
            return True

        def are_here() -> bool:
            missing = [buffered for buffered in many if _is_missing(buffered)]
            for buffered in missing:
                self._group.host(buffered).fetch_again([buffered])
            return not missing

        for buffered in many:  # all of them, because present bodies must not be forgotten while the rest arrive
            self._group.host(buffered).state.wanted.add(buffered)
        try:
            return await self.until(are_here)
        finally:
            for buffered in many:
                self._group.host(buffered).state.wanted.discard(buffered)

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Return True when ``holds`` returns True. Return False if that takes too long.

        ``holds`` is called again whenever messages have arrived, and at least every ``ASK_SECONDS``.
        """
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
        """Wake the waiting calls, because messages arrived, or may arrive now."""
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)


def _is_missing(buffered: BufferedMessage) -> bool:
    return buffered.message is None and buffered.state is not MessageState.DROPPED
