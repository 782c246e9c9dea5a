"""Waits until the bodies of leased messages are in memory again, if this proxy has dropped them.

A repeated attempt, a rejection, a pull and a read of a lease group need the bodies. This module only waits for the
bodies; the queue hosts fetch them. If a message is unsettled on the current channel of its queue, the queue host
requeues the message, so that the broker delivers it again with its body. Otherwise the next channel delivers the
message.
"""

import asyncio
from collections.abc import Callable, Sequence

from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState

WAIT_SECONDS_MAX = 5.0
ASK_SECONDS = 0.5
"""Maximum seconds between two calls of ``ask`` during a wait. A single call may not reopen a queue that was just
closed."""


class BodyRetrieval:
    """Waits for the bodies of messages of ``group``.

    ``ask`` must open the group's queues and make the broker deliver.
    """

    def __init__(self, group: ServedGroup, *, ask: Callable[[], None]) -> None:
        self._group = group
        self._ask = ask
        self._change: asyncio.Future[None] | None = None

    async def bring_back(self, many: Sequence[BufferedMessage]) -> bool:
        """Wait until the body of each message is in memory, or the message is dropped. Then return True.

        Return False after ``WAIT_SECONDS_MAX``.
        """
        if not any(map(_is_missing, many)):
            return True

        def are_here() -> bool:
            missing = [buffered for buffered in many if _is_missing(buffered)]
            for buffered in missing:
                self._group.host(buffered).fetch_again([buffered])
            return not missing

        for buffered in many:  # also with a body: it must not be dropped while the other bodies arrive
            self._group.host(buffered).state.memory.wanted.add(buffered)
        try:
            return await self.until(are_here)
        finally:
            for buffered in many:
                self._group.host(buffered).state.memory.wanted.discard(buffered)

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until ``holds`` returns True, and return True. Return False after ``WAIT_SECONDS_MAX``.

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
        """Make all waiting calls check again, because messages have arrived, or may arrive now."""
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)


def _is_missing(buffered: BufferedMessage) -> bool:
    return buffered.message is None and buffered.state is not MessageState.DROPPED
