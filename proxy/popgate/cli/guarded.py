"""A command that runs while a lock is held, and is ended with it: its process, and the signals that pass to it.

Where a terminal has this process in its foreground, the command stays in the same process group, so that it can read
from the terminal, and gets its Ctrl-C from there. Elsewhere it has a group of its own, and whatever it has started is
ended with it.

    starting --> running --the command ends--> ended
                    |--end(): SIGTERM, after the grace SIGKILL-->|
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
"""A terminal sends these to every process of its foreground."""


class GuardedCommand:
    """One command, run once; `with guarded.signals():` around everything, in the main thread."""

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
        """They pass to the command while it runs; before it is started, and after its end, they end this one. What is
        ignored stays ignored, by the command as well."""
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
        """The command's exit code; 128 + the signal's number where one has ended it. Of what is to be ended before it
        has begun, nothing is run.

        Raises: CommandFailed where it can't be started.
        """
        if self._doomed.is_set():
            return ExitCode.LOCK_LOST
        sys.stdout.flush()
        process_group = 0 if self._own_group else None
        self._starting = True  # a signal that comes now must not leave a process that nobody knows of
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
        if self._doomed.is_set():  # while it was started
            threading.Thread(target=self.end, name="popgate-end", daemon=True).start()
        try:
            code = process.wait()
        finally:
            self._ended.set()
        if self._doomed.is_set() and self._own_group:  # nothing that it has left behind goes on
            self._send(signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """SIGTERM, and SIGKILL where it has not ended within the grace. Waits; for another thread than `run`'s."""
        self._doomed.set()
        if self._process is None or self._ended.is_set():
            return
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # what is stopped can't end
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            if self._own_group:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal has this process in its foreground."""
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
