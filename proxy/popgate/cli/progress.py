"""Reports the progress of long work on standard error."""

import time
from typing import TextIO

FIRST_SECONDS = 1.0
TERMINAL_SECONDS = 0.2
PLAIN_SECONDS = 5.0


class Progress:
    """Reports progress of work that takes long. On a terminal, it rewrites one line, beginning after a second.
    Elsewhere, it writes a new line every 5 s.

    If ``shown`` is None, progress is reported only on a terminal. ``verb`` is a past participle that says what was done
    with the messages.
    """

    def __init__(self, stream: TextIO, *, shown: bool | None, verb: str = "published") -> None:
        self._verb = verb
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._shown = self._on_terminal if shown is None else shown
        self._started = time.monotonic()
        self._next = self._started + (FIRST_SECONDS if self._on_terminal else PLAIN_SECONDS)
        self._standing = False

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def tell(self, done: int, failed: int) -> None:
        """Report the counts of messages, if the next report is due."""
        failures = f", {failed:,} failed" if failed else ""
        per_second = done / max(self.elapsed_seconds, 1e-9)
        self.say(f"{done:,} {self._verb}{failures}, {per_second:,.0f}/s")

    def say(self, line: str) -> None:
        """Write this line, if the next report is due."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + (TERMINAL_SECONDS if self._on_terminal else PLAIN_SECONDS)
        self.clear()
        self._stream.write(line if self._on_terminal else f"{line}\n")
        self._stream.flush()
        self._standing = self._on_terminal

    def clear(self) -> None:
        """Erase the progress line on a terminal, so that other text can be printed."""
        if self._standing:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._standing = False
