"""Remembers which request the current task serves, so that the lines that it logs name the request.

Only the task of the request itself has the id. A task that it starts may go on after the request, and for others. A
task that works for this request alone has the id if its work is wrapped by ``carried``.
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_current: ContextVar[tuple["asyncio.Task[object] | None", str] | None] = ContextVar("popgate_request", default=None)


@contextmanager
def serving_request(request_id: str) -> Generator[None]:
    """Within the context, the current task serves the request with this id."""
    token = _current.set((asyncio.current_task(), request_id))
    try:
        yield
    finally:
        _current.reset(token)


def carried(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return ``work`` for a task of its own, which then serves the same request as the current task."""
    request_id = current_request_id()
    return work if request_id is None else _carried(request_id, work)


async def _carried(request_id: str, work: Coroutine[Any, Any, T]) -> T:
    with serving_request(request_id):
        return await work


def current_request_id() -> str | None:
    """Return the id of the request that the current task serves, or None if there is none, or if it has no id."""
    current = _current.get()
    if current is None:
        return None
    task, request_id = current
    try:
        return request_id if asyncio.current_task() is task else None
    except RuntimeError:  # another thread, without an event loop
        return None
