"""An event loop in virtual time: when nothing is ready, time jumps to the next timer.

This module owns time and order. It uses no selector, no threads and no real clock: the same callbacks run in the same
order each time. The context of a callback says to which process (``processes``) it belongs; callbacks of a paused
process are held back until it resumes, and callbacks of a dead process never run.
"""
# pyright: reportPrivateUsage=false
# An event loop must use private parts of asyncio's loops and handles.

import asyncio
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from struct import Struct
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast
from zlib import crc32

_double = Struct("d").pack
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

STEPS_MAX = 400_000
"""Maximum number of steps; a loop that exceeds it is considered endless."""


TASKS_MIN = 100
"""Number of tasks below which ended ones are not removed."""
TICK_SECONDS = 1e-7
"""Seconds that always pass between two timers: a clock with another zero may be off by a rounding, and wait again."""


class DeadlockError(Exception):
    """Nothing is ready and no timer is left, so every task would wait forever."""


class Gate(Protocol):
    """Decides whether a callback of its process may run."""

    mark: bytes
    """Its name, for the trace."""
    is_open: bool
    tasks: "Tasks"
    """All its tasks."""

    def hold(self, handle: "VirtualHandle") -> None:
        """Keep it until later, or discard it."""
        ...


class Tasks:
    """Tasks that may never end, and must not be collected before ``bury``: their final code would run."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._look_at = TASKS_MIN

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) >= self._look_at:
            self._tasks = self.left()
            self._look_at = TASKS_MIN + 2 * len(self._tasks)

    def left(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def bury(self) -> None:
        """Close the tasks, which will never run again, without a warning from the interpreter."""
        for task in self.left():
            setattr(task, "_log_destroy_pending", False)  # noqa: B010  # asyncio's own switch, which has no type
            try:
                cast("Coroutine[Any, Any, Any]", task.get_coro()).close()
            except BaseException:  # what its final code uses is no longer there
                continue
        self._tasks.clear()


belongs_to: ContextVar[Gate | None] = ContextVar("belongs_to", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Begins at ``start`` (seconds). ``trace`` is a checksum of all callbacks: equal runs have equal ones."""

    def __init__(self, start: float = 1_000.0) -> None:
        super().__init__()
        self.steps = 0
        self.trace = 0
        self.errors: list[str] = []
        """Exceptions of callbacks and forgotten tasks; each is a bug."""
        self._now = start
        self._queue: deque[VirtualHandle] = deque()
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._numbers = 0
        self._stopping = False
        self._nobodys = Tasks()
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._now

    # -- what is to run -----------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> Handle:
        handle = VirtualHandle(0.0, callback, args, self, copy_context() if context is None else context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> Handle:
        """Same as ``call_soon``: there is only one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> TimerHandle:
        handle = VirtualHandle(when, callback, args, self, copy_context() if context is None else context)
        self._numbers += 1
        heappush(self._timers, (when, self._numbers, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(
            coro, loop=self, name=None if name is None else str(name), context=context, **options
        )
        gate = belongs_to.get() if context is None else context.get(belongs_to)
        (self._nobodys if gate is None else gate.tasks).add(task)
        return task

    def again(self, handle: "VirtualHandle") -> None:
        """Run now what was held back."""
        self._queue.append(handle)

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end, and nothing after it. Raises: DeadlockError, and what ``main`` raises."""
        asyncio.events._set_running_loop(self)
        try:
            task = self.create_task(main, name="main")
            while not task.done():
                self._step()
            return task.result()
        finally:
            asyncio.events._set_running_loop(None)

    def _step(self) -> None:
        queue = self._queue
        if not queue:
            self._pass_time()
        handle = queue.popleft()
        callback = handle._callback
        if callback is None:
            return
        context = handle._context
        gate: Gate | None = context.get(belongs_to)
        if gate is not None:
            if not gate.is_open:
                gate.hold(handle)
                return
            self.trace = crc32(gate.mark, self.trace)
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise DeadlockError(f"more than {STEPS_MAX} steps: something runs in a circle")
        try:
            context.run(callback, *handle._args)
        except Exception as error:
            if gate is None:  # an error of the simulation itself
                raise
            self.errors.append(f"{callback!r}: {error!r}")

    def _pass_time(self) -> None:
        timers, queue = self._timers, self._queue
        while timers:
            when, _, handle = heappop(timers)
            if handle._callback is None:
                continue
            now = self._now = when if when > self._now else self._now + TICK_SECONDS
            self.trace = crc32(_double(now), self.trace)
            queue.append(handle)
            while timers and timers[0][0] <= now:
                queue.append(heappop(timers)[2])
            return
        raise DeadlockError("nothing is ready, and nothing is to come")

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def close(self) -> None:
        self._nobodys.bury()
        super().close()

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def get_debug(self) -> bool:
        return False


class VirtualHandle(TimerHandle):
    """asyncio's own handle with cheaper creation and cancellation."""

    __slots__ = ()
    _context: Context
    _callback: Callable[..., object] | None
    _args: Sequence[Any]

    def __init__(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], loop: VirtualLoop, context: Context
    ) -> None:
        self._when, self._callback, self._args, self._loop, self._context = when, callback, args, loop, context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = None, ()


class VirtualClock:
    """The clock port. The monotonic clocks of processes have different zeros."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, zero: float, wall: float) -> None:
        self._loop = loop
        self._zero = zero
        self._wall = wall

    def monotonic(self) -> float:
        return self._loop.time() + self._zero

    def wall(self) -> float:
        return self._loop.time() + self._wall

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._wall += seconds
