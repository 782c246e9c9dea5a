"""Starts popgate as a fork of a process that has already imported it.

Importing popgate takes longer than all else that most proxies of the tests do, and a run starts hundreds of them. A
forked proxy is a process like any other, with its own session, files and environment; only its import is not repeated.
The doctor, the replica keeper, keys and administration, of which tests run hundreds of commands, are forked as well. A
run by a single process does not fork, and neither do the other tests of the command line itself.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Self

MODULES = {"popgate.cli", "cluster.dying_proxy", "support.collecting_proxy", "support.poisoned_proxy"}
"""Programs that may be forked, because they change nothing before the first line of their module."""
PRELOADED = [
    "popgate.bootstrap",
    "popgate.bootstrap.doctor",
    "popgate.bootstrap.replicas",
    "popgate.bootstrap.workers",
    "popgate.cli.client_commands",
    "popgate.cli.doctor",
    "popgate.cli.replicas",
    "popgate.cli.serve",
]
POLL_SECONDS = 0.001
_PR_SET_PDEATHSIG = 1
_APPEND = os.O_WRONLY | os.O_APPEND

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


class Streams(NamedTuple):
    """The files of a program: what it reads, what it writes, and its errors."""

    given: str
    output: str
    errors: str


class ForkedPopgate:
    """The process, with what `subprocess.Popen` offers and `Server` uses."""

    def __init__(self, start: Start, streams: Streams, folder: Path) -> None:
        self._process: BaseProcess = _forking.Process(target=_run, args=(start, streams, str(folder)))
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


def run_to_end(start: Start, given: bytes, timeout_seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a command, like `subprocess.run`. Raises: subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="popgate-command-") as name:
        folder = Path(name)
        files = folder / "given", folder / "output", folder / "errors"
        for file, content in zip(files, (given, b"", b""), strict=True):
            file.write_bytes(content)
        process = ForkedPopgate(start, Streams(*map(str, files)), Path.cwd())
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(start.arguments, code, files[1].read_bytes(), files[2].read_bytes())


def _run(start: Start, streams: Streams, folder: str) -> None:
    """Run the program in this process, which was just forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    library: Any = forkserver  # no public way: this process would keep the fork server alive after the test run
    os.close(library._forkserver._forkserver_alive_fd)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(start.environment)
    for stream, (path, flags) in enumerate(
        [(streams.given, os.O_RDONLY), (streams.output, _APPEND), (streams.errors, _APPEND)]
    ):
        descriptor = os.open(path, flags)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it ends with the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.argv = [start.module, *start.arguments]
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)
