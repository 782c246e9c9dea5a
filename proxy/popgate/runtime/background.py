"""Background work that is owned: every task has a name, a keeper and an end.

Owns the tasks and what happens when one fails. Knows nothing of what they do.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class Background:
    """Keeps tasks alive and reports those that fail: an unexpected failure is a bug, for ``on_failure`` to act on."""

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure
        self._stopping = False

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
        """Run ``work`` as a named task; None once stopping."""
        if self._stopping:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def stop(self) -> None:
        """Cancel everything and wait for it. Idempotent, and safe before anything was spawned."""
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
            _log.error("a background task failed", exc_info=error, extra={"task": task.get_name()})
            if self._on_failure is not None:
                self._on_failure(error)
