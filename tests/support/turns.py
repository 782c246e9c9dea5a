"""Which tests run beside each other, where several processes share a run.

More processes than cores use the time in which tests wait. But a test that bounds how many seconds something takes
wants the machine as two processes leave it: beside it at most one other runs, however many processes there are.
"""

import fcntl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
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

    @contextmanager
    def taken(self, *, quiet: bool) -> Generator[None]:
        """A test takes a place, a quiet one all but one; they are free again when it ends, however it does."""
        wanted = max(1, len(self._places) - 1) if quiet else 1
        with ExitStack() as taken:
            with self._door.open("w") as door:  # closed, a file is locked no more
                fcntl.flock(door, fcntl.LOCK_EX)  # so nobody who wants much is overtaken by those who want little
                while wanted:
                    for place in self._places:
                        if wanted and (locked := _locked(place)) is not None:
                            taken.enter_context(locked)
                            wanted -= 1
                    sleep(LOOK_SECONDS if wanted else 0)
            yield


def _locked(path: Path) -> IO[str] | None:
    """None: it is locked already, by whomever."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
