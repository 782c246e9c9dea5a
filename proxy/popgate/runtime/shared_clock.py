"""One wall clock for all proxies of a cluster: the store's.

A machine's wall clock may be wrong, or be set while a proxy runs. Values that proxies compare must not depend on it:
when a message expires, its place among the messages of its key, a generation. So ``wall`` follows the store's time,
which is read periodically. In between, and while the store is unavailable, the machine's monotonic clock advances it.

The store reads its time between the request and the answer. If the current offset is consistent with that, it is kept,
because the clocks of machines mostly agree better than a busy proxy can measure. Otherwise it is moved only as far as
necessary: it is then off by less than the shortest round trip.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock

LOOK_SECONDS = 4.0, 6.0
"""Minimum and maximum seconds between two looks at the store's time."""


class SharedClock:
    """A clock whose ``wall`` is the store's. ``own`` is the machine's clock; ``ask`` returns the store's Unix time.

    Before the first look, ``wall`` continues from the machine's wall time at construction.
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
        """Compare with the store. Raises: RetryLater if it does not answer; then nothing has changed."""
        asked = self._own.monotonic()
        now = await self._ask()
        answered = self._own.monotonic()
        self._offset = min(max(self._offset, now - answered), now - asked)

    async def follow(self) -> None:
        """Look periodically. Never returns."""
        while True:
            await asyncio.sleep(random.uniform(*LOOK_SECONDS))
            try:
                await self.look()
            except RetryLater:
                continue  # the known time continues


_conforms: type[Clock] = SharedClock
