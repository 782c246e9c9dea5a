"""Threads for handlers that block. Owns the threads; knows nothing of messages being settled.

Not a ThreadPoolExecutor, whose threads are joined when the interpreter ends: a handler that hangs would keep the
process alive after its lease was given back. These are daemon threads.
"""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from popgate_client.message import Message


@dataclass(frozen=True, slots=True)
class _Ended:
    value: object
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[Message], object]
    message: Message
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[_Ended]


class HandlerThreads:
    """At most `count` threads, started when they are needed. For one event loop; the caller keeps to `count` calls."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    async def call(self, function: Callable[[Message], object], message: Message) -> object:
        """Run `function(message)` in a thread, with the caller's context variables.

        Raises: whatever the function raises. A cancellation is the caller's alone: the thread runs on, and its result
        is dropped.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, message, contextvars.copy_context(), loop, loop.create_future())
        self._busy += 1
        if self._busy > len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name=f"popgate-handler-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(call)
        try:
            ended = await call.ended
        finally:
            self._busy -= 1
        if ended.error is not None:
            raise ended.error
        return ended.value

    def close(self) -> None:
        """Let idle threads end, and busy ones when their function returns. Does not wait."""
        for _ in self._threads:
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                ended = _Ended(call.context.run(call.function, call.message), None)
            except BaseException as error:  # whatever ends a handler is told to its awaiter, SystemExit included
                ended = _Ended(None, error)
            try:
                call.loop.call_soon_threadsafe(_tell, call.ended, ended)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del call, ended  # an idle thread must not keep the last body in memory


def _tell(future: asyncio.Future[_Ended], ended: _Ended) -> None:
    if not future.done():
        future.set_result(ended)
