"""Takes over a terminal: shows a text that changes, and reads single keys.

The terminal is restored in any case: at the end, after an error, Ctrl-C, SIGTERM or SIGHUP, and while the process is
suspended (Ctrl-Z).
"""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any

from popgate.cli.endings import Terminated

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Show the alternate screen without a cursor, so that the former content returns at the end."""
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
KEY_BYTES_MAX = 64


class Screen:
    """A terminal that ``screen`` has taken over."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._modes: list[Any] = termios.tcgetattr(keys)
        self._awake, self._waker = os.pipe()
        for end in (self._awake, self._waker):
            os.set_blocking(end, False)
        self._waking = threading.RLock()  # a signal handler may interrupt another one
        self._is_closed = False

    @property
    def size(self) -> os.terminal_size:
        return os.get_terminal_size(self._keys)  # not COLUMNS, which does not follow a resize

    def enter(self) -> None:
        tty.setcbreak(self._keys)
        sys.stdout.write(ENTER)
        sys.stdout.flush()

    def leave(self) -> None:
        """Restore the terminal. A second call does nothing new."""
        termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)
        with contextlib.suppress(OSError):
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Replace the content. The caller has shortened the lines to the width."""
        shown = "".join(f"{line}{CLEAR_LINE}\n" for line in lines[:-1]) + lines[-1] + CLEAR_LINE
        sys.stdout.write(f"{HOME}{shown}{CLEAR_BELOW}")
        sys.stdout.flush()

    def key(self, until: float) -> str | None:
        """Return the next key, or ``""`` if the content must be drawn again. Return None at the time ``until``, or when
        the keyboard is gone."""
        wait = max(0.0, until - time.monotonic())
        ready = select.select([self._keys, self._awake], [], [], wait)[0]
        if self._awake in ready:
            os.read(self._awake, KEY_BYTES_MAX)
            return ""
        if self._keys in ready:
            pressed = os.read(self._keys, KEY_BYTES_MAX).decode(errors="replace")
            if not pressed:
                raise Terminated
            return pressed
        return None

    def wake(self) -> None:
        """Let ``key`` return, so that the caller draws again. May be called by a signal handler, and by another thread
        even after the end."""
        with self._waking, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._waker, b"x")

    def close(self) -> None:
        with self._waking:
            self._is_closed = True
            os.close(self._awake)
            os.close(self._waker)


@contextlib.contextmanager
def screen() -> Generator[Screen]:
    """Take over the terminal of standard input and output within the context. Raises: Terminated, at a signal."""
    taken = Screen(sys.stdin.fileno())

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    def suspend(number: int, frame: FrameType | None) -> None:
        taken.leave()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when a shell continues this process
        taken.enter()
        taken.wake()

    def resize(number: int, frame: FrameType | None) -> None:
        taken.wake()

    handlers = {
        signal.SIGTERM: terminate,
        signal.SIGHUP: terminate,
        signal.SIGTSTP: suspend,
        signal.SIGWINCH: resize,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        taken.enter()
        yield taken
    finally:
        taken.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
        taken.close()
