"""Child processes that never outlive the test run, and free ports for them.

Owns: starting, signalling and ending one process, and keeping two test runs on one machine off each other's ports.
Does not know what the process is.

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
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

# Below the range from which Linux takes ports for outgoing connections: a killed server finds its port free again.
PORT_MIN, PORT_MAX = 20_000, 32_000
PORT_ATTEMPTS_MAX = 200
LOG_TAIL_LINES = 40
KILL_TIMEOUT_SECONDS = 10
POLL_SECONDS = 0.02

# The kernel's parent-death signal follows the *thread* that started the child, so that all are started from one thread
# which lives as long as the interpreter.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


class ServerMissingError(Exception):
    """A server program that the tests need is not installed."""


class ServerFailedError(Exception):
    """A server did not start, did not answer or did not stop in time; the message ends with the tail of its log."""


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float, what: str) -> None:
    """Return as soon as `condition` holds. Raises: TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)


class PortBlock:
    """`count` consecutive free TCP ports of 127.0.0.1 that no other test run chooses while this object lives.

    The claim is the UDP port of the same number, which the servers leave alone: it holds also while they are down.
    """

    def __init__(self, count: int = 1) -> None:
        # Not the shared generator: Hypothesis seeds that, and two runs would walk through the same ports.
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
    """The descriptor that claims this port, or None where the port is taken."""
    with socket.socket(type=socket.SOCK_STREAM) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
        except OSError:
            return None
        return udp.detach()


class Startable(ABC):
    """What `start` brings up and `close` ends for good: a context manager of the two."""

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

    A context manager that starts it and ends it. `folder` belongs to the caller and is made where it is missing;
    what the server prints (both streams) is appended to `output.log` there.
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
        # Nothing of the developer's own settings but what finding programs needs.
        self._environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(environment or {})}
        self._log = folder / "output.log"
        self._log_start = 0
        self._popen: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _answers(self) -> bool:
        """Whether clients can work with it now; False, never an exception, where it can't be reached."""

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Start it and return when clients can work with it. Raises: ServerFailedError."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process without waiting for it. Does nothing where it runs."""
        if self.is_running():
            return
        setpriv = shutil.which("setpriv")
        die_with_us = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = _spawner.submit(
                subprocess.Popen[bytes],
                [*die_with_us, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the tests, which then end the servers in order
            ).result()
        atexit.register(self.kill)

    def wait_ready(self) -> None:
        """Return when clients can work with it. Raises: ServerFailedError, at once where the process ends."""
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
        """Whether the process lives; a paused one does."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def output(self) -> str:
        """What it has printed since it was last started."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def failure(self, what: str) -> ServerFailedError:
        """The error to raise: what happened, and the last lines that it printed."""
        state = f"pid {self.pid}, " + ("running" if self.is_running() else f"exit status {self._process.returncode}")
        tail = "\n".join(self.output.splitlines()[-LOG_TAIL_LINES:])
        return ServerFailedError(f"{self.name} ({state}) {what}; its last lines:\n{tail}")

    # ------------------------------------------------------------ end, and worse

    def wait(self, timeout_seconds: float) -> int:
        """The exit status (negative: the signal that ended it). Raises: ServerFailedError if it runs on."""
        try:
            status = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise self.failure(f"did not end within {timeout_seconds:g} s") from error
        atexit.unregister(self.kill)
        return status

    def stop(self) -> int:
        """End it in order (SIGTERM) and return its exit status. Raises: ServerFailedError if it does not end."""
        self.signal(signal.SIGTERM)
        return self.wait(self.stop_timeout_seconds)

    def kill(self) -> None:
        """SIGKILL to it and to what it started. Does nothing where it does not run."""
        if self._popen is not None:
            if self.is_running():
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(KILL_TIMEOUT_SECONDS)

    def pause(self) -> None:
        """SIGSTOP: it hangs, its connections stay open. Returns when all its threads stand still."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_until(
            lambda: all(_state(task) in "TZ" for task in tasks.glob("*/stat")),
            timeout_seconds=KILL_TIMEOUT_SECONDS,
            what=f"{self.name} to stand still",
        )

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        self.signal(signal.SIGCONT)

    def restart(self) -> None:
        """`stop`, then `start`."""
        self.stop()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill it and free what this object holds; the data stays in its folder. A second call does nothing."""
        self.kill()

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise ServerFailedError(f"{self.name} was never started")
        return self._popen


def _state(stat: Path) -> str:
    """The one letter by which the kernel calls a thread's state; T for one that has ended meanwhile."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"


def accepts(port: int, *, say: bytes = b"", expect: bytes = b"") -> bool:
    """Whether 127.0.0.1:`port` takes a connection and answers `say` with what begins with `expect`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(say)
            return not expect or connection.recv(len(expect)) == expect
    except OSError:
        return False
