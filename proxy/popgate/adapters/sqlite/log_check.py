"""Finds damage in the middle of SQLite's log (WAL), which SQLite itself takes for the log's end.

Theory of operation. The log is a header and frames of one page each, chained by checksums; the last frame of a
transaction is marked. SQLite reads up to the first frame that does not fit and ignores the rest, because a power cut
leaves such an end. But a transaction is synced before the next one is written. Suppose that a whole transaction and a
frame behind it, chained to each other, follow a frame that does not fit. Then that frame was on stable storage and has
been damaged since, and answered writes would be lost silently. Likewise a header is synced before the first frame.

A log that is cut off, or damaged in its last transaction, can't be distinguished from one that a power cut has left.
Formats: sqlite.org/fileformat2.html, section 4.
"""

from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_MAGIC = 0x377F0682
"""The last bit says whether the checksums are made of big-endian words."""
_HEADER = Struct(">IIIIIIII")
_FRAME = Struct(">IIIIII")
_WORD_BITS = 0xFFFF_FFFF

Sums = tuple[int, int]


class _Frame(NamedTuple):
    ends_transaction: bool
    salts: tuple[int, int]
    sums: Sums


def damage_in(log: Path, *, bytes_max: int) -> str | None:
    """Return what is damaged in ``log`` that was once on stable storage; None if no damage is known. Raises: OSError.

    A log of more than ``bytes_max`` is not checked: it takes about a second for 16 MiB.
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
    """The frames in ``content``. ``salts`` are the header's: frames with others are left over from an earlier use."""

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
        """Return whether the frame is whole and continues a frame with these ``sums``."""
        frame = self.read(number)
        if frame.salts != self._salts:
            return False
        start = _HEADER.size + number * self._size
        sums = _sums(sums, self._content[start : start + 8], self._order)
        page = self._content[start + _FRAME.size : start + self._size]
        return _sums(sums, page, self._order) == frame.sums

    def proves_a_sync(self, number: int) -> bool:
        """Return whether the frame ends a transaction and the next one was written behind it."""
        frame = self.read(number)
        return frame.ends_transaction and frame.salts == self._salts and self.follows(number + 1, frame.sums)


def _sums(sums: Sums, content: bytes, order: str) -> Sums:
    first, second = sums
    words: Sequence[int] = Struct(f"{order}{len(content) // 4}I").unpack(content)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _WORD_BITS
        second = (second + other + first) & _WORD_BITS
    return first, second
