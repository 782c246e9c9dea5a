"""One wall clock for all proxies of a cluster: the store's.

A machine's wall clock may be wrong, or be set while a proxy runs. What proxies compare must not depend on it: when a
message expires, its place among the messages of its key, a generation. So ``wall`` follows the store's time, which is
asked for now and then. In between, and while the store is away, the machine's monotonic clock advances it.

An answer says that the store's time was read between the question and the answer. A time that fits is kept, for the
clocks of machines mostly agree better than a busy proxy can measure. One that does not fit is moved just as far as it
must be: it is then off by less than the shortest round trip.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock

LOOK_SECONDS = 4.0, 6.0
"""Least and greatest pause between two questions."""


class SharedClock:
    """``own`` is the machine's clock; ``ask`` answers the store's time in Unix seconds.

    Before the first look ``wall`` is the machine's, as it was at the construction.
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
        """Compare with the store. Raises: RetryLater where it does not answer; then nothing has changed."""
        asked = self._own.monotonic()
        now = await self._ask()
        answered = self._own.monotonic()
        self._offset = min(max(self._offset, now - answered), now - asked)

    async def follow(self) -> None:
        """Look again and again. Never returns."""
        while True:
            await asyncio.sleep(random.uniform(*LOOK_SECONDS))
            try:
                await self.look()
            except RetryLater:
                continue  # the time that is known goes on


_conforms: type[Clock] = SharedClock
