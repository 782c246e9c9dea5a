"""Reads standard input as batches of lines, with bounded memory.

Theory of operation. A single thread waits at most ``TICK_SECONDS`` for input, and then reads the data that is
available. It collects lines until the batch is full, or until the first line of the batch is ``LINGER_SECONDS`` old. So
a file becomes full batches, and a line of slow input, such as from ``tail -f``, is sent almost immediately. No read
blocks without a time limit, so the process can always end.
"""

import os
import select
import time
from collections.abc import Iterator
from typing import NamedTuple

from popgate.cli.endings import CommandFailed

CHUNK_BYTES = 256 * 1024
BATCH_COUNT_MAX = 256
BATCH_BYTES_MAX = 8 * 1024 * 1024
LINGER_SECONDS = 0.02
TICK_SECONDS = 0.25


class Line(NamedTuple):
    """One line of the input, without its newline. ``number`` is 1 for the first line. If the line is too long,
    ``content`` is empty."""

    number: int
    content: bytes
    too_long: bool = False


class LineSource:
    """Reads lines from a file, a pipe or a terminal. A line longer than ``line_bytes_max`` is marked ``too_long``."""

    def __init__(self, descriptor: int, *, line_bytes_max: int) -> None:
        self._descriptor = descriptor
        self._line_bytes_max = line_bytes_max
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._number = 0
        self.ended = False

    def read(self, wait_seconds: float) -> list[Line]:
        """Return the lines that have arrived completely. Wait up to ``wait_seconds`` for data. The last line of the
        input needs no newline."""
        if not select.select([self._descriptor], [], [], wait_seconds)[0]:
            return []
        chunk = _read(self._descriptor)
        if not chunk:
            self.ended = True
            return [self._finish()] if self._begun_bytes else []
        *ends, beginning = chunk.split(b"\n")
        lines: list[Line] = []
        for end in ends:
            self._take(end)
            lines.append(self._finish())
        self._take(beginning)
        return lines

    def _take(self, piece: bytes) -> None:
        self._begun_bytes += len(piece)
        if self._begun_bytes > self._line_bytes_max:
            self._begun.clear()
        elif piece:
            self._begun.append(piece)

    def _finish(self) -> Line:
        self._number += 1
        line = Line(self._number, b"".join(self._begun), self._begun_bytes > self._line_bytes_max)
        self._begun, self._begun_bytes = [], 0
        return line


def batches(source: LineSource) -> Iterator[list[Line]]:
    """Yield the lines of the input in batches. An empty batch means that no line has arrived for ``TICK_SECONDS``.

    Raises: CommandFailed if the input can't be read.
    """
    batch: list[Line] = []
    size = 0
    begun = 0.0
    while not source.ended:
        wait = max(0.0, begun + LINGER_SECONDS - time.monotonic()) if batch else TICK_SECONDS
        lines = source.read(wait)
        for line in lines:
            if batch and (len(batch) == BATCH_COUNT_MAX or size + len(line.content) > BATCH_BYTES_MAX):
                yield batch
                batch, size = [], 0
            if not batch:
                begun = time.monotonic()
            batch.append(line)
            size += len(line.content)
        if not batch:
            yield []
        elif time.monotonic() >= begun + LINGER_SECONDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_whole(descriptor: int, bytes_max: int) -> bytes | None:
    """Read the input to its end, and return it. Return None if the input is longer than ``bytes_max``. Raises:
    CommandFailed."""
    pieces: list[bytes] = []
    size = 0
    while piece := _read(descriptor):
        pieces.append(piece)
        size += len(piece)
        if size > bytes_max:
            return None
    return b"".join(pieces)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except OSError as error:
        raise CommandFailed(f"can't read standard input: {error.strerror}") from error
