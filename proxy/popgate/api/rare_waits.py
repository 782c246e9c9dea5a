"""Replaces objects of uvicorn that each connection or request has, but rarely needs, with smaller ones.

An ``asyncio.Event`` and a ``deque`` have room for 64 entries from the beginning, which takes 760 bytes. A connection
whose pop waits would have four of them. A proxy may have 10,000 such connections.
"""

import asyncio
from collections import deque
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
_NO_WAITERS = cast("deque[asyncio.Future[Any]]", ())


class RareEvent(asyncio.Event):
    """An event that is usually set before a task waits for it. The queue of waiting tasks is created by the first."""

    def __init__(self) -> None:
        self._value = False
        self._waiters = _NO_WAITERS

    async def wait(self) -> Literal[True]:
        """See ``asyncio.Event``."""
        if not self._value and not self._waiters:
            self._waiters = deque()
        return await super().wait()


class RareQueue(list[T]):
    """The methods of a ``deque`` that uvicorn uses for pipelined requests. There are at most a few requests."""

    __slots__ = ()

    def appendleft(self, entry: T) -> None:
        """Add an entry in front of the others."""
        self.insert(0, entry)
