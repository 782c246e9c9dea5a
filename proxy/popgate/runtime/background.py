"""Runs background tasks, reports their failures, and cancels them at shutdown. Every task has a name.

This module does not depend on the work of the tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Seconds between the failure of a loop and its restart."""


class Background:
    """Runs background tasks, and calls ``on_failure`` with each exception that a task raises.

    A task is expected to handle all errors itself, so such an exception is a bug.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure
        self._stopping = False

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
        """Run ``work`` in a task with ``name``, and return the task.

        After a call of ``stop``, run nothing and return None.
        """
        if self._stopping:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None] | None:
        """Run the endless loop ``work`` in a task with ``name``, and restart the loop if it fails.

        Return the task. After a call of ``stop``, run nothing and return None.
        """
        return self.spawn(self._kept(work, name), name=name)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        while True:
            try:
                return await work()
            except Exception as error:
                self._failed(error, name)
            await asyncio.sleep(AGAIN_SECONDS)

    async def stop(self) -> None:
        """Cancel all tasks except the caller's, and wait until they have ended.

        Idempotent, and safe before the first task.
        """
        self._stopping = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed(error, task.get_name())

    def _failed(self, error: BaseException, name: str) -> None:
        _log.error("a background task failed", exc_info=error, extra={"task": name})
        if self._on_failure is not None:
            self._on_failure(error)
