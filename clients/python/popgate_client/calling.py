"""Calls a user's handler: a plain function in a thread, an `async` one in the event loop."""

import inspect
from collections.abc import Callable
from typing import TypeAlias

from popgate_client.message import Message
from popgate_client.threads import HandlerThreads

Handler: TypeAlias = Callable[[Message], object]
"""A function of one message: a plain one (run in a thread) or an `async` one. Its return value is ignored."""


class HandlerCalls:
    """Calls one handler in one event loop; the caller makes at most `concurrency` calls at once."""

    def __init__(self, handler: Handler, *, concurrency: int) -> None:
        self._handler = handler
        # An object whose __call__ is async is an async handler too.
        self._is_async = any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))
        self._concurrency = concurrency
        self._threads = HandlerThreads(concurrency)

    async def call(self, message: Message) -> None:
        """Return when the handler has ended. Raises: what the handler raises; see `HandlerThreads.call` for threads."""
        result = self._handler(message) if self._is_async else await self._threads.call(self._handler, message)
        if inspect.isawaitable(result):
            await result

    def renew(self) -> None:
        """Use new threads for later calls, because handlers still occupy the old ones."""
        self._threads.close()
        self._threads = HandlerThreads(self._concurrency)

    def close(self) -> None:
        """Let each thread end when its handler ends. Does not wait."""
        self._threads.close()
