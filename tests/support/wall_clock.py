"""The wall clock of processes that are started under it; it can be set forward and back while they run."""

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

SITECUSTOMIZE = """
import mmap, os, struct, time
with open(os.environ["WALL_OFFSET_FILE"], "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real_time, real_time_ns = time.time, time.time_ns
time.time = lambda: real_time() + struct.unpack("d", offset[:8])[0]
time.time_ns = lambda: real_time_ns() + int(struct.unpack("d", offset[:8])[0] * 1e9)
"""
"""Code that Python runs at startup: the proxy's wall clock deviates by the number in a file that the test writes."""


class WallClock:
    """The wall clock of the processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        file = folder / "offset"
        file.write_bytes(struct.pack("d", 0.0))
        with file.open("r+b") as stream:
            self._offset = mmap.mmap(stream.fileno(), 8)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), "WALL_OFFSET_FILE": str(file)}

    def set(self, seconds: float) -> None:
        """Set the clock that far ahead of the machine's clock, from now on."""
        self._offset[:8] = struct.pack("d", seconds)

    def shown(self) -> float:
        """Return the time that a process under it sees."""
        command = [sys.executable, "-c", "import time; print(time.time())"]
        return float(
            subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, check=True).stdout
        )
