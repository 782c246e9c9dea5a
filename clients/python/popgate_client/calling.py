"""Calls a user's handler: a plain function in a thread, an `async` one in the event loop."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeAlias

from popgate_client.message import Message
from popgate_client.publishing import Deserializer
from popgate_client.threads import HandlerThreads

Handler: TypeAlias = Callable[[Message], object]
"""A function of one message: a plain one (run in a thread) or an `async` one. Its return value is ignored."""


def is_async(handler: Handler) -> bool:
    """Whether the handler is an `async` function, or an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))


def prepared(handler: Handler, deserializer: Deserializer | None) -> Handler:
    """Return the handler, called with messages whose `data` is what `deserializer` makes of the body.

    Raises: TypeError if the handler can't be called with a message.
    """
    if not callable(handler):
        raise TypeError(f"the handler must be a function of one message, not {type(handler).__name__}: {handler!r:.80}")
    if deserializer is None:
        return handler
    if is_async(handler):

        @wraps(handler)
        async def handle_async(message: Message) -> object:
            result: Any = handler(replace(message, deserializer=deserializer))
            return await result

        return handle_async

    @wraps(handler)
    def handle(message: Message) -> object:
        return handler(replace(message, deserializer=deserializer))

    return handle


class HandlerCalls:
    """Calls one handler in one event loop; the caller makes at most `concurrency` calls at once."""

    def __init__(self, handler: Handler, *, concurrency: int) -> None:
        self._handler = handler
        self._is_async = is_async(handler)
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
