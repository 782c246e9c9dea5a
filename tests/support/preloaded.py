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
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import IO, Any, NamedTuple, Self

MODULES = {"popgate.cli", "cluster.dying_proxy", "support.collecting_proxy", "support.poisoned_proxy"}
"""Programs that may be forked, because they change nothing before the first line of their module."""
PRELOADED = ["popgate.bootstrap", "popgate.bootstrap.workers", "popgate.cli.serve"]
POLL_SECONDS = 0.001
_PR_SET_PDEATHSIG = 1

_forking = multiprocessing.get_context("forkserver")
_is_on = Event()


def turn_on() -> None:
    """Fork from now on."""
    _is_on.set()
    _forking.set_forkserver_preload(PRELOADED)


class Start(NamedTuple):
    """A program that can be forked: its module, the arguments that follow it, and its whole environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self | None:
        """Read a command line, which may begin with `env`. Return None if it must be executed."""
        words, whole = [*command], dict(environment)
        if words[0] == "env":
            del words[0]
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                if name != "PYTHONPATH":  # the fork server has it
                    whole[name] = value
        early = {name: value for name, value in whole.items() if name.startswith(("PYTHON", "LD_"))}
        early.pop("PYTHONUNBUFFERED", None)
        is_early = any(os.environ.get(name) != value for name, value in early.items())
        is_known = words[:2] == [sys.executable, "-m"] and words[2] in MODULES
        return cls(words[2], words[3:], whole) if _is_on.is_set() and is_known and not is_early else None


class ForkedPopgate:
    """The process, with what `subprocess.Popen` offers and `Server` uses."""

    def __init__(self, start: Start, output: IO[bytes], folder: Path) -> None:
        self._process: BaseProcess = _forking.Process(target=_run, args=(start, os.fsdecode(output.name), str(folder)))
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        with suppress(ProcessLookupError):  # it may have ended already: the fork server reaps it at once
            while os.getpgid(self.pid) != self.pid:  # it must be the head of its group
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
            raise subprocess.TimeoutExpired("popgate", timeout_seconds)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _run(start: Start, output: str, folder: str) -> None:
    """Run the program in this process, which was just forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    library: Any = forkserver  # no public way: this process would keep the fork server alive after the test run
    os.close(library._forkserver._forkserver_alive_fd)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(start.environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - it ends with the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.argv = [start.module, *start.arguments]
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)
