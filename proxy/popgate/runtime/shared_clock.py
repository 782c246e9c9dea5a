"""Provides one wall clock for all proxies of a cluster: the store's.

A machine's wall clock may be wrong, or be set while a proxy runs. Values that proxies compare must not depend on it,
such as the time at which a message expires, a message's place among the messages of its key, or a generation. So
``wall`` follows the store's time, which is read periodically. Between two reads, and while the store is unavailable,
the machine's monotonic clock advances it.

The store reads its time at some moment between the request and the answer. If the current offset is possible under this
condition, it is kept, because the clocks of machines mostly agree better than a busy proxy can measure. Otherwise it is
changed only as far as necessary: its error is then less than the shortest round trip.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock

LOOK_SECONDS = 4.0, 6.0
"""Minimum and maximum seconds between two reads of the store's time."""


class SharedClock:
    """A clock whose ``wall`` is the store's time.

    ``own`` is the machine's clock. ``ask`` returns the store's Unix time. Before the first read, ``wall`` continues
    from the machine's wall time at construction.
    """

    def __init__(self, own: Clock, ask: Callable[[], Awaitable[float]]) -> None:
        self._own = own
        self._ask = ask
        self._offset = own.wall() - own.monotonic()

    def monotonic(self) -> float:
        return self._own.monotonic()

    def wall(self) -> float:
        return self._own.monotonic() + self._offset

    async def look(self) -> None:
        """Read the store's time and correct the offset.

        Raises: RetryLater if the store does not answer. The offset is then kept.
        """
        asked = self._own.monotonic()
        now = await self._ask()
        answered = self._own.monotonic()
        self._offset = min(max(self._offset, now - answered), now - asked)

    async def follow(self) -> None:
        """Read the store's time periodically. Never returns."""
        while True:
            await asyncio.sleep(random.uniform(*LOOK_SECONDS))
            try:
                await self.look()
            except RetryLater:
                continue  # the clock continues with the known offset


_conforms: type[Clock] = SharedClock
