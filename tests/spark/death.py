"""Kills a streaming query at a chosen point: `FOLDER/die` names a step and a batch.

Without this file the query runs on. `FOLDER/pid` names the process group to kill: the driver's Python and its JVM.
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
        """Order the query of this folder to be killed at this point."""
        (self._folder / "die").write_text(f"{step} {epoch}")

    @property
    def is_due(self) -> bool:
        return (self._folder / "die").exists()

    def may_come(self, step: str, epoch: int) -> None:
        """Kill the query if that was ordered for this point."""
        if self.takes_order(step, epoch):
            self.come()
            time.sleep(60)  # Spark's workers are of another group; they end when their JVM has

    def takes_order(self, step: str, epoch: int) -> bool:
        """Whether the kill was ordered for this point; the order is removed."""
        order = self._folder / "die"
        try:
            if order.read_text() != f"{step} {epoch}":
                return False
            order.unlink()
        except FileNotFoundError:  # or another task was faster
            return False
        return True

    def come(self) -> None:
        """Kill the driver and its JVM; return only if this is another process."""
        os.killpg(int((self._folder / "pid").read_text()), signal.SIGKILL)
