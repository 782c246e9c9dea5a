"""Finds damage in SQLite's write-ahead log (WAL). SQLite itself treats the first damage as the end of the log.

Theory of operation. The log consists of a header and frames. Each frame contains one page and a checksum that continues
the checksum of the previous frame. The last frame of a transaction is marked. SQLite reads up to the first frame whose
checksum does not match, and ignores the rest of the log, because a power cut leaves a log with such an end. But SQLite
syncs each transaction to the disk before it writes the next one. Suppose that a frame does not match, and that behind
it the end of a transaction is followed by a frame that continues the checksum. Then the frame that does not match was
already on stable storage and was damaged later. SQLite would silently lose writes that popgate has confirmed. In the
same way, SQLite syncs the header before it writes the first frame.

If a log was cut off, or was damaged in its last transaction, popgate can't distinguish it from a log after a power cut.
The format is described at sqlite.org/fileformat2.html, section 4.
"""

from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_MAGIC = 0x377F0682
"""The magic number of a log, without its last bit. This bit is set if the checksums use big-endian words."""
_HEADER = Struct(">IIIIIIII")
_FRAME = Struct(">IIIIII")
_WORD_BITS = 0xFFFF_FFFF

Sums = tuple[int, int]


class _Frame(NamedTuple):
    ends_transaction: bool
    salts: tuple[int, int]
    sums: Sums


def damage_in(log: Path, *, bytes_max: int) -> str | None:
    """Return which part of ``log`` was damaged after it had reached stable storage, or None if no damage was found.

    A log of more than ``bytes_max`` bytes is not checked, because the check of 16 MiB takes about one second.

    Raises: OSError.
    """
    if not log.exists() or log.stat().st_size > bytes_max:
        return None
    content = log.read_bytes()
    if len(content) <= _HEADER.size:
        return None
    magic, _, page_size, _, *salts, first, second = _HEADER.unpack_from(content)
    order = ">" if magic & 1 else "<"
    if magic & ~1 != _MAGIC or _sums((0, 0), content[: _HEADER.size - 8], order) != (first, second):
        return "its header" if content[_HEADER.size :].strip(b"\0") else None
    frames = _Frames(content, page_size, (salts[0], salts[1]), order)
    sums, number = (first, second), 0
    while number < frames.count and frames.follows(number, sums):
        sums = frames.read(number).sums
        number += 1
    if any(frames.proves_a_sync(one) for one in range(number, frames.count - 1)):
        return f"frame {number + 1} of {frames.count}"
    return None


class _Frames:
    """The frames of a log with the bytes ``content``.

    ``salts`` are the salts in the header. A frame with other salts was written before SQLite restarted the log, and is
    ignored.
    """

    def __init__(self, content: bytes, page_size: int, salts: tuple[int, int], order: str) -> None:
        self._content = content
        self._size = _FRAME.size + page_size
        self._salts = salts
        self._order = order
        self.count = (len(content) - _HEADER.size) // self._size

    def read(self, number: int) -> _Frame:
        _, pages, *rest = _FRAME.unpack_from(self._content, _HEADER.size + number * self._size)
        return _Frame(pages > 0, (rest[0], rest[1]), (rest[2], rest[3]))

    def follows(self, number: int, sums: Sums) -> bool:
        """Return whether the frame is intact and follows a frame (or the header) with the checksums ``sums``."""
        frame = self.read(number)
        if frame.salts != self._salts:
            return False
        start = _HEADER.size + number * self._size
        sums = _sums(sums, self._content[start : start + 8], self._order)
        page = self._content[start + _FRAME.size : start + self._size]
        return _sums(sums, page, self._order) == frame.sums

    def proves_a_sync(self, number: int) -> bool:
        """Return whether the frame ends a transaction, and the first frame of the next transaction follows it."""
        frame = self.read(number)
        return frame.ends_transaction and frame.salts == self._salts and self.follows(number + 1, frame.sums)


def _sums(sums: Sums, content: bytes, order: str) -> Sums:
    first, second = sums
    words: Sequence[int] = Struct(f"{order}{len(content) // 4}I").unpack(content)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _WORD_BITS
        second = (second + other + first) & _WORD_BITS
    return first, second
