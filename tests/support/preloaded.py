"""Starts popgate as a fork of a process that has already imported it.

Importing popgate takes longer than all else that most proxies of the tests do, and a run starts hundreds of them. A
forked proxy is a process like any other, with its own session, files and environment; only its import is not repeated.
A run by a single process does not fork, and neither do the tests of the command line itself.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import IO

PROGRAM = "popgate.cli"
PRELOADED = ["popgate.bootstrap", "popgate.bootstrap.workers", "popgate.cli.serve"]
POLL_SECONDS = 0.001
_PR_SET_PDEATHSIG = 1

_forking = multiprocessing.get_context("forkserver")
_is_on = Event()


def turn_on() -> None:
    """Fork from now on."""
    _is_on.set()
    _forking.set_forkserver_preload(PRELOADED)


def can_start(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tell whether this is popgate's command line, in an environment that changes nothing before its first line."""
    is_early = any(name.startswith(("PYTHON", "LD_")) and name != "PYTHONUNBUFFERED" for name in environment)
    return _is_on.is_set() and not is_early and [*arguments[:3]] == [sys.executable, "-m", PROGRAM]


class ForkedPopgate:
    """The process, with what `subprocess.Popen` offers and `Server` uses."""

    def __init__(
        self, arguments: Sequence[str], output: IO[bytes], folder: Path, environment: Mapping[str, str]
    ) -> None:
        flags = (os.fsdecode(output.name), str(folder), dict(environment), [*arguments[3:]])
        self._process: BaseProcess = _forking.Process(target=_run, args=flags)
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # it must be the head of its group
            time.sleep(POLL_SECONDS)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit status. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout_seconds)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout_seconds)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(output: str, folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Run popgate in this process, which was just forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - it ends with the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.argv = [PROGRAM, *arguments]
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
