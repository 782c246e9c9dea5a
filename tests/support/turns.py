"""Which tests run beside each other, where several processes share a run.

More processes than cores use the time in which tests wait. But a test that bounds how many seconds something takes
wants the machine as two processes leave it: beside it at most one other runs, however many processes there are.
"""

import fcntl
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import IO

LOOK_SECONDS = 0.02


class Turns:
    """`folder` is shared by the `processes` of a run, each of which runs one test at a time."""

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir(exist_ok=True)
        self._door = folder / "door"
        self._places = [folder / f"{number}" for number in range(processes)]
        self._taken = ExitStack()
        self._count = 0

    def take(self, *, quiet: bool) -> None:
        """Wait until this process has a place, and all but one for a quiet test. Those that it kept count."""
        wanted = max(1, len(self._places) - 1) if quiet else 1
        if self._count == wanted:
            return
        self.give_back()
        with self._door.open("w") as door:  # closing the file unlocks it
            fcntl.flock(door, fcntl.LOCK_EX)  # so a test that wants many places is not overtaken by those that want one
            while self._count < wanted:
                for place in self._places:
                    if self._count < wanted and (locked := _locked(place)) is not None:
                        self._taken.enter_context(locked)
                        self._count += 1
                sleep(LOOK_SECONDS if self._count < wanted else 0)

    def give_back(self) -> None:
        """Free the places of this process for the others."""
        self._taken.close()
        self._count = 0


def _locked(path: Path) -> IO[str] | None:
    """None: another process has locked it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
