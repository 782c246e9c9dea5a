"""A process of the simulation: what runs in it, and its end.

Owns whether its callbacks run. A paused one (SIGSTOP) keeps what arrives and does it all when it goes on; of a killed
one (SIGKILL) nothing ever runs again, no ``finally`` either, and all its memory is gone.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from simulator.loop import Tasks, VirtualHandle, VirtualLoop, belongs_to


class Process:
    """Runs until it is killed. ``context``: whatever is scheduled with it belongs to this process."""

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
        """Idempotent."""
        if self.is_dead:
            return
        self.is_open, self.is_dead = False, True
        self._held.clear()
        for tell in list(self._at_death):
            tell()

    def bury(self) -> None:
        """After the run: it is dead, and so are its tasks."""
        self._at_death.clear()
        self.kill()
        self.tasks.bury()
