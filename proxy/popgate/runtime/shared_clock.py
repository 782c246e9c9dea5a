"""Provides one wall clock for all proxies of a cluster: the clock of the store.

A machine's wall clock may be wrong, or may be set while a proxy runs. Values that several proxies compare must not
depend on it. Examples are the time at which a message expires, the position of a message among the messages with the
same ordering key, and a generation. So ``wall`` follows the store's clock, which is read periodically. Between two
reads, and while the store is unavailable, ``wall`` advances with the machine's monotonic clock.

The store reads its clock at some moment between the request and the answer. This restricts the offset between the
store's clock and the machine's monotonic clock to a range. If the current offset is in this range, it is not changed,
because machines' clocks usually agree better than a busy proxy can measure. Otherwise it is changed to the nearest
value in the range. The error of the offset is then less than the shortest round trip.
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

    ``own`` is the machine's clock. ``ask`` returns the store's Unix time. Before the first read of the store's time,
    ``wall`` starts at the machine's wall time.
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

        Raises: RetryLater if the store does not answer. The offset is then not changed.
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
