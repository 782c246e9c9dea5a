"""A user's handler and how it is called: a plain function in a thread, an `async` one in the event loop."""

import inspect
from collections.abc import Callable
from typing import TypeAlias

from popgate_client.message import Message
from popgate_client.threads import HandlerThreads

Handler: TypeAlias = Callable[[Message], object]
"""Gets one message; a plain function (run in a thread) or an `async` one. What it returns is not looked at."""


class HandlerCalls:
    """Calls one handler, for one event loop; the caller keeps to `concurrency` calls at once."""

    def __init__(self, handler: Handler, *, concurrency: int) -> None:
        self._handler = handler
        # An object whose __call__ is async is an async handler too.
        self._is_async = any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))
        self._concurrency = concurrency
        self._threads = HandlerThreads(concurrency)

    async def call(self, message: Message) -> None:
        """Return when the handler has ended. Raises: whatever it raises; see `HandlerThreads.call` for threads."""
        result = self._handler(message) if self._is_async else await self._threads.call(self._handler, message)
        if inspect.isawaitable(result):
            await result

    def renew(self) -> None:
        """Threads were left behind with their handlers: the calls to come get others."""
        self._threads.close()
        self._threads = HandlerThreads(self._concurrency)

    def close(self) -> None:
        """Let the threads end, each when its handler does. Does not wait."""
        self._threads.close()
