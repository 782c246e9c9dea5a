"""Runs background tasks. Every task has a name, an owner and an end.

Owns the tasks and handles their failures, without knowing what they do.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Seconds before a failed loop is restarted."""


class Background:
    """Runs tasks and passes their failures to ``on_failure``. An unexpected failure is a bug."""

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure
        self._stopping = False

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
        """Run ``work`` as a named task. After ``stop`` was called, run nothing and return None."""
        if self._stopping:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None] | None:
        """Run an endless loop as a named task, and restart it if it fails. After ``stop`` was called, return None."""
        return self.spawn(self._kept(work, name), name=name)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        while True:
            try:
                return await work()
            except Exception as error:
                self._failed(error, name)
            await asyncio.sleep(AGAIN_SECONDS)

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent, and safe before anything was spawned."""
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
