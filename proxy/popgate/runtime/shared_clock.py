"""One wall clock for all proxies of a cluster: the store's.

A machine's wall clock may be wrong, or be set while a proxy runs. What proxies compare must not depend on it: when a
message expires, its place among the messages of its key, a generation. So ``wall`` is the store's time, asked for now
and then. In between, and while the store is away, the machine's monotonic clock advances it.

Of several looks the one with the shortest round trip counts, for ``KEPT_SECONDS``: it is off by half of that at most.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock

LOOK_SECONDS = 4.0, 6.0
KEPT_SECONDS = 60.0
"""A look counts for so long: clocks of machines drift apart."""


class SharedClock:
    """``own`` is the machine's; ``ask`` answers the store's time in Unix seconds.

    Before the first look ``wall`` is the machine's, as it was at the construction.
    """

    def __init__(self, own: Clock, ask: Callable[[], Awaitable[float]]) -> None:
        self._own = own
        self._ask = ask
        self._offset = own.wall() - own.monotonic()
        self._trip_seconds, self._looked_at = float("inf"), float("-inf")

    def monotonic(self) -> float:
        return self._own.monotonic()

    def wall(self) -> float:
        return self._own.monotonic() + self._offset

    async def look(self) -> None:
        """Compare with the store. Raises: RetryLater where it does not answer; then nothing has changed."""
        asked = self._own.monotonic()
        now = await self._ask()
        answered = self._own.monotonic()
        trip_seconds = answered - asked
        if trip_seconds <= self._trip_seconds or answered - self._looked_at > KEPT_SECONDS:
            self._trip_seconds, self._looked_at = trip_seconds, answered
            self._offset = now - (asked + answered) / 2

    async def follow(self) -> None:
        """Look again and again. Never returns."""
        while True:
            await asyncio.sleep(random.uniform(*LOOK_SECONDS))
            try:
                await self.look()
            except RetryLater:
                continue  # the time that is known goes on


_conforms: type[Clock] = SharedClock
