"""Runs a command while a lock is held. If the lock is lost, the command is ended. Signals are forwarded to the command.

If this process is in the foreground of a terminal, the command stays in the same process group, so that it can read
from the terminal and receive Ctrl-C. Otherwise the command runs in its own process group. If the lock is then lost, all
processes of the command's group are ended.

    starting --> running --the command ends--> ended
                   |--end(): SIGTERM, then SIGKILL after the grace period-->|
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from types import FrameType

from popgate.cli.endings import CommandFailed, ExitCode, Terminated

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal itself sends to every process in its foreground."""


class GuardedCommand:
    """A command that runs once while a lock is held. In the main thread, put `with guarded.signals():` around all calls
    of its other methods."""

    def __init__(self, words: Sequence[str], *, grace_seconds: float) -> None:
        self._words = words
        self._grace_seconds = grace_seconds
        self._own_group = not _in_foreground()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._waiting: list[int] = []
        self._doomed = threading.Event()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def signals(self) -> Generator[None]:
        """Within the context, forward signals to the command while it runs. Before the command's start and after its
        end, signals end this process.

        This process and the command ignore the signals that this process has ignored so far.
        """
        before = {number: signal.getsignal(number) for number in PASSED}
        passed = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in passed:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in passed:
                signal.signal(number, before[number])

    def run(self, environment: Mapping[str, str]) -> int:
        """Run the command. Return its exit code, or 128 + the number of the signal that ended it.

        If `end` was called before, the command is not started. Raises: CommandFailed if it can't be started.
        """
        if self._doomed.is_set():
            return ExitCode.LOCK_LOST
        sys.stdout.flush()
        process_group = 0 if self._own_group else None
        self._starting = True  # a signal that arrives now must not end this process and leave the command running
        try:
            process = subprocess.Popen(self._words, env={**os.environ, **environment}, process_group=process_group)
            self._process = process
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "not found" if missing else getattr(error, "strerror", None) or str(error)
            failed = ExitCode.COMMAND_NOT_FOUND if missing else ExitCode.COMMAND_NOT_EXECUTABLE
            raise CommandFailed(f"can't run {self._words[0]!r}: {reason}", failed) from error
        finally:
            self._starting = False
        for number in self._waiting:
            self._pass(number)
        if self._doomed.is_set():  # the lock was lost during the start
            threading.Thread(target=self.end, name="popgate-end", daemon=True).start()
        try:
            code = process.wait()
        finally:
            self._ended.set()
        if self._doomed.is_set() and self._own_group:  # also end the processes that the command has left behind
            self._send(signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Send SIGTERM to the command. If it has not ended within the grace period, send SIGKILL.

        This call waits, so the thread that calls it must not be the thread of `run`.
        """
        self._doomed.set()
        if self._process is None or self._ended.is_set():
            return
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a stopped process does not handle SIGTERM
        if not self._ended.wait(self._grace_seconds):
            self._send(signal.SIGKILL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._starting:
            self._waiting.append(number)
        elif self._process is not None and not self._ended.is_set():
            self._pass(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated

    def _pass(self, number: int) -> None:
        if self._own_group or number not in FROM_THE_TERMINAL:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the command has just ended
            if self._own_group:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _in_foreground() -> bool:
    """Return whether this process is in the foreground of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
