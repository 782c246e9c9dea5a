"""Child processes that never outlive the test run, and free ports for them.

This module starts, signals and ends one process, and keeps two test runs on one machine from using the same ports. It
does not know what the process is.

A process ends with the run in one of three ways, so that none is left behind: its owner closes it; `atexit` kills it;
the kernel kills it when this interpreter is killed with SIGKILL (Linux, through `setpriv --pdeathsig`).
"""

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

from support import preloaded
from support.preloaded import ForkedPopgate, Streams

# Below the range from which Linux takes ports for outgoing connections, so a killed server finds its port still free.
PORT_MIN, PORT_MAX = 20_000, 32_000
PORT_ATTEMPTS_MAX = 200
LOG_TAIL_LINES = 40
KILL_TIMEOUT_SECONDS = 10
POLL_SECONDS = 0.02

# The kernel's parent-death signal follows the *thread* that started the child, so one thread that lives as long as the
# interpreter starts all children.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


class ServerMissingError(Exception):
    """A server program that the tests need is not installed."""


class ServerFailedError(Exception):
    """A server did not start, answer or stop in time; the message ends with the tail of its log."""


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float, what: str) -> None:
    """Return as soon as `condition` holds. Raises: TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)


class PortBlock:
    """`count` consecutive free TCP ports of 127.0.0.1 that no other test run chooses while this object lives.

    The UDP port with the same number serves as the claim. The servers do not use it, so the claim holds even while they
    are down.
    """

    def __init__(self, count: int = 1) -> None:
        # Not the shared generator: Hypothesis seeds it, and two runs would then try the same ports.
        chance = random.SystemRandom()
        for _ in range(PORT_ATTEMPTS_MAX):
            first = chance.randrange(PORT_MIN, PORT_MAX - count)
            claims = [_claim(port) for port in range(first, first + count)]
            held = [claim for claim in claims if claim is not None]
            if len(held) == count:
                break
            for claim in held:
                os.close(claim)
        else:
            raise ServerFailedError(f"no {count} free ports found in {PORT_ATTEMPTS_MAX} attempts")
        self.ports = range(first, first + count)
        for claim in held:
            weakref.finalize(self, os.close, claim)


def _claim(port: int) -> int | None:
    """Return the descriptor that claims this port, or None if the port is taken."""
    with socket.socket(type=socket.SOCK_STREAM) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
        except OSError:
            return None
        return udp.detach()


class Startable(ABC):
    """An object that `start` brings up and `close` ends for good; also the context manager of the two."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Server(Startable):
    """A server process that can be started, stopped, killed, paused, and started again on the same ports and data.

    As a context manager it starts and closes the process. `folder` belongs to the caller and is made if it is missing;
    the server's output (both streams) is appended to `output.log` there.
    """

    ready_timeout_seconds: ClassVar[float]
    stop_timeout_seconds: ClassVar[float]

    def __init__(
        self, name: str, folder: Path, *, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.folder = folder
        self._arguments = arguments
        # Keep only the part of the developer's environment that is needed to find programs.
        self._environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(environment or {})}
        self._log = folder / "output.log"
        self._log_start = 0
        self._popen: subprocess.Popen[bytes] | ForkedPopgate | None = None

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether clients can use it now; returns False, never raises, if it can't be reached."""

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Start it and return when clients can use it. Raises: ServerFailedError."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process without waiting for it. Does nothing if it runs."""
        if self.is_running():
            return
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            start = preloaded.Start.of(self._arguments, self._environment)
            if start is None:
                self._popen = self._executed(output)
            else:
                log = str(self._log)
                self._popen = ForkedPopgate(start, Streams(os.devnull, log, log), self.folder)
        atexit.register(self.kill)

    def _executed(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        setpriv = shutil.which("setpriv")
        die_with_us = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        return _spawner.submit(
            subprocess.Popen[bytes],
            [*die_with_us, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=self.folder,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the tests, which then end the servers in order
        ).result()

    def wait_ready(self) -> None:
        """Return when clients can use it. Raises: ServerFailedError, immediately if the process ends."""
        try:
            wait_until(
                lambda: not self.is_running() or self._answers(),
                timeout_seconds=self.ready_timeout_seconds,
                what=f"{self.name} to answer",
            )
        except TimeoutError as error:
            raise self.failure("did not answer in time") from error
        if not self.is_running():
            raise self.failure("ended before it answered")

    # ------------------------------------------------------------ watch

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        """Tell whether the process lives, even if it is paused."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def output(self) -> str:
        """Return its output since it was last started."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def failure(self, what: str) -> ServerFailedError:
        """Return the error to raise: the failure, and the last lines of output."""
        state = f"pid {self.pid}, " + ("running" if self.is_running() else f"exit status {self._process.returncode}")
        tail = "\n".join(self.output.splitlines()[-LOG_TAIL_LINES:])
        return ServerFailedError(f"{self.name} ({state}) {what}; its last lines:\n{tail}")

    # ------------------------------------------------------------ end, and worse

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit status (negative: the signal that ended it). Raises: ServerFailedError if it does not end."""
        try:
            status = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise self.failure(f"did not end within {timeout_seconds:g} s") from error
        atexit.unregister(self.kill)
        return status

    def stop(self) -> int:
        """End it with SIGTERM and return its exit status. Raises: ServerFailedError if it does not end."""
        self.signal(signal.SIGTERM)
        return self.wait(self.stop_timeout_seconds)

    def kill(self) -> None:
        """Send SIGKILL to it and to its child processes. Does nothing if it does not run."""
        if self._popen is not None:
            if self.is_running():
                with suppress(ProcessLookupError):  # it has just ended: a fork server reaps it at once
                    os.killpg(self.pid, signal.SIGKILL)
            self.wait(KILL_TIMEOUT_SECONDS)

    def pause(self) -> None:
        """Send SIGSTOP: it hangs, its connections stay open. Returns when all its threads are stopped."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_until(
            lambda: all(_state(task) in "TZ" for task in tasks.glob("*/stat")),
            timeout_seconds=KILL_TIMEOUT_SECONDS,
            what=f"{self.name} to stand still",
        )

    def resume(self) -> None:
        """Send SIGCONT after `pause`."""
        self.signal(signal.SIGCONT)

    def restart(self) -> None:
        """Call `stop`, then `start`."""
        self.stop()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; do nothing if it has ended."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill it and free what this object holds; the data stays in its folder. A second call does nothing."""
        self.kill()

    @property
    def _process(self) -> subprocess.Popen[bytes] | ForkedPopgate:
        if self._popen is None:
            raise ServerFailedError(f"{self.name} was never started")
        return self._popen


def _state(stat: Path) -> str:
    """Return the kernel's one-letter state of a thread; T if it has ended meanwhile."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"


def accepts(port: int, *, say: bytes = b"", expect: bytes = b"") -> bool:
    """Tell whether 127.0.0.1:`port` accepts a connection and answers `say` with bytes that begin with `expect`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(say)
            return not expect or connection.recv(len(expect)) == expect
    except OSError:
        return False
