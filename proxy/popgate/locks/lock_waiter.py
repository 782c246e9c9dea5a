"""Lets a client wait for a lock, and lets other code end this wait early."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from popgate.domain.errors import LockNotFound
from popgate.runtime.timeouts import expire_now

T = TypeVar("T")


class LockWaiter:
    """The wait of one client for a lock. ``end`` ends the wait immediately; the client then gets no lock."""

    def __init__(self) -> None:
        self.ended = False
        self.error: LockNotFound | None = None
        self._limit: asyncio.Timeout | None = None

    def end(self, error: LockNotFound | None = None) -> None:
        """End the wait. Only the first call has an effect.

        If ``error`` is given, the client receives this error instead of the answer that the lock was not acquired.
        """
        if not self.ended:
            self.ended, self.error = True, error
            if self._limit is not None:
                expire_now(self._limit)

    async def wait_for(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of ``work``. If the wait ends first, cancel ``work`` and return None."""
        if self.ended:
            return None
        limit = self._limit = asyncio.timeout(None)
        try:
            async with limit:
                return await work()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._limit = None
