"""Where a streaming query is killed: `FOLDER/die` names a step and a batch.

Where there is no such file the query lives on. `FOLDER/pid` names the process group to kill: the driver's Python and
its JVM.
"""

import os
import signal
import time
from pathlib import Path


class Death:
    """Kills the query at one step of one epoch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def order(self, step: str, epoch: int) -> None:
        """The query whose folder this is shall die there."""
        (self._folder / "die").write_text(f"{step} {epoch}")

    @property
    def is_due(self) -> bool:
        return (self._folder / "die").exists()

    def may_come(self, step: str, epoch: int) -> None:
        """Die here, if that was ordered."""
        if self.takes_order(step, epoch):
            self.come()
            time.sleep(60)  # Spark's workers are of another group; they end when their JVM has

    def takes_order(self, step: str, epoch: int) -> bool:
        """Whether it was ordered for here, which it is no more."""
        order = self._folder / "die"
        try:
            if order.read_text() != f"{step} {epoch}":
                return False
            order.unlink()
        except FileNotFoundError:  # or another task was faster
            return False
        return True

    def come(self) -> None:
        """Kill the driver and its JVM, and return where this is another process."""
        os.killpg(int((self._folder / "pid").read_text()), signal.SIGKILL)
