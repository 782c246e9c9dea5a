"""Threads for handlers that block. Knows nothing of settling messages.

This is not a ThreadPoolExecutor, because the interpreter joins its threads at exit: a handler that hangs would keep the
process alive after its message was released. These are daemon threads. They are reused, because libraries tie expensive
objects (database connections) to a thread.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

ArgumentT = TypeVar("ArgumentT")


class HandlerThreads:
    """Runs functions in at most `count` threads, started when needed. For one event loop; the caller makes at most
    `count` calls at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def call(self, function: Callable[[ArgumentT], object], argument: ArgumentT) -> object:
        """Run `function(argument)` in a thread, with the caller's context variables.

        Raises: what the function raises. A cancellation affects only the caller: the thread runs on, and its result is
        dropped.
        """
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        # (value, error), because a future can't have a StopIteration as its exception.
        ended: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def tell(value: object, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result((value, error))

        def work() -> None:
            value, failure = None, None
            try:
                value = context.run(function, argument)
            except BaseException as error:  # the awaiter gets every exception, SystemExit included
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no awaiter any more
                loop.call_soon_threadsafe(tell, value, failure)

        self._busy += 1
        if self._busy > self._started < self._count:
            name = f"popgate-handler-{self._started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._started += 1
        self._calls.put(work)
        try:
            value, error = await ended
        finally:
            self._busy -= 1
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Let idle threads end, and busy ones when their function returns. Does not wait."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
            del work  # an idle thread must not keep the last body in memory
