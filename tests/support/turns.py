"""Decides which tests run in parallel when several processes share a run.

More processes than cores use the time in which tests wait. But a test with a time limit expects the machine as two
processes leave it, so at most one other test runs beside it, however many processes there are.
"""

import fcntl
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from time import sleep
from typing import IO

LOOK_SECONDS = 0.02

Quiet = Callable[[Sequence[int]], AbstractAsyncContextManager[None]]
"""Creates a context in which servers, by their process ids, go before others, or at most one other test runs."""


class Turns:
    """`folder` is shared by the `processes` of a run, each of which runs one test at a time."""

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir(exist_ok=True)
        self._door = folder / "door"
        self._places = [folder / f"{number}" for number in range(processes)]
        self._taken = ExitStack()
        self._count = 0

    def take(self, *, quiet: bool) -> None:
        """Wait until this process has one place, or all but one for a quiet test. In the meantime it has none, so that
        two tests that become quiet don't wait for each other.
        """
        wanted = max(1, len(self._places) - 1) if quiet else 1
        if self._count == wanted:
            return
        self.give_back()
        with self._door.open("w") as door:  # closing the file unlocks it
            fcntl.flock(door, fcntl.LOCK_EX)  # so a test that needs many places is not overtaken by those that need one
            while self._count < wanted:
                for place in self._places:
                    if self._count < wanted and (locked := _locked(place)) is not None:
                        self._taken.enter_context(locked)
                        self._count += 1
                sleep(LOOK_SECONDS if self._count < wanted else 0)

    def give_back(self) -> None:
        """Free the places of this process."""
        self._taken.close()
        self._count = 0


def _locked(path: Path) -> IO[str] | None:
    """Lock the file; return None if another process has locked it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
