"""A process of the simulation: the code that runs in it, and its end.

This module owns whether its callbacks run. A paused process (SIGSTOP) keeps what arrives and handles it all when it
resumes; in a killed one (SIGKILL) nothing ever runs again, not even a ``finally``, and all its memory is gone.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from simulator.loop import Tasks, VirtualHandle, VirtualLoop, belongs_to


class Process:
    """Runs until it is killed. ``context``: callbacks scheduled with it belong to this process."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_open = True
        self.is_dead = False
        self.context = Context()
        self.context.run(belongs_to.set, self)
        self._loop = loop
        self._held: list[VirtualHandle] = []
        self.mark = name.encode()
        self.tasks = Tasks()
        self._at_death: dict[Callable[[], object], None] = {}

    # -- the gate -----------------------------------------------------------------------------------------------

    def hold(self, handle: VirtualHandle) -> None:
        if not self.is_dead:
            self._held.append(handle)

    # -- what runs in it ----------------------------------------------------------------------------------------

    def call(self, work: Callable[..., object], *arguments: object) -> None:
        """Call ``work`` in this process, soon."""
        self._loop.call_soon(work, *arguments, context=self.context)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._loop.create_task(work, name=name, context=self.context.copy())

    @property
    def task_names(self) -> list[str]:
        return [task.get_name() for task in self.tasks.left()]

    # -- its end ------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return not self.is_open and not self.is_dead

    def pause(self) -> None:
        self.is_open = self.is_dead

    def resume(self) -> None:
        if not self.is_dead:
            self.is_open = True
            held, self._held = self._held, []
            for handle in held:
                self._loop.again(handle)

    def at_death(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` as soon as the process is dead."""
        self._at_death[tell] = None

    def not_at_death(self, tell: Callable[[], object]) -> None:
        self._at_death.pop(tell, None)

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        if self.is_dead:
            return
        self.is_open, self.is_dead = False, True
        self._held.clear()
        for tell in list(self._at_death):
            tell()

    def bury(self) -> None:
        """End the dead process's tasks, after the run."""
        self._at_death.clear()
        self.kill()
        self.tasks.bury()
