"""Finds damage in the middle of SQLite's log (WAL), which SQLite itself treats as the end of the log.

Theory of operation. The log is a header and frames of one page each, chained by checksums. The last frame of a
transaction is marked. SQLite reads up to the first frame that does not match and ignores the rest, because a power cut
leaves such an end. But a transaction is synced before the next one is written. Suppose that a frame does not match, but
a whole transaction and a frame behind it, chained to each other, follow this frame. Then the mismatching frame was on
stable storage and has been damaged since, and SQLite would silently lose writes that popgate has confirmed. In the same
way, the header is synced before the first frame.

A log that was cut off, or damaged in its last transaction, can't be distinguished from a log that a power cut has left.
Formats: sqlite.org/fileformat2.html, section 4.
"""

from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_MAGIC = 0x377F0682
"""The magic number without its last bit, which is set if the checksums use big-endian words."""
_HEADER = Struct(">IIIIIIII")
_FRAME = Struct(">IIIIII")
_WORD_BITS = 0xFFFF_FFFF

Sums = tuple[int, int]


class _Frame(NamedTuple):
    ends_transaction: bool
    salts: tuple[int, int]
    sums: Sums


def damage_in(log: Path, *, bytes_max: int) -> str | None:
    """Return which part of ``log`` is damaged that was once on stable storage, or None if no damage is known.

    A log of more than ``bytes_max`` is not checked: checking 16 MiB takes about a second. Raises: OSError.
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
    """The frames in ``content``.

    ``salts`` are the header's: frames with other salts are remains of an earlier use of the log.
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
        """Return whether the frame is complete and continues a frame with these ``sums``."""
        frame = self.read(number)
        if frame.salts != self._salts:
            return False
        start = _HEADER.size + number * self._size
        sums = _sums(sums, self._content[start : start + 8], self._order)
        page = self._content[start + _FRAME.size : start + self._size]
        return _sums(sums, page, self._order) == frame.sums

    def proves_a_sync(self, number: int) -> bool:
        """Return whether the frame ends a transaction and the next transaction's first frame follows it."""
        frame = self.read(number)
        return frame.ends_transaction and frame.salts == self._salts and self.follows(number + 1, frame.sums)


def _sums(sums: Sums, content: bytes, order: str) -> Sums:
    first, second = sums
    words: Sequence[int] = Struct(f"{order}{len(content) // 4}I").unpack(content)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _WORD_BITS
        second = (second + other + first) & _WORD_BITS
    return first, second
