"""The disk below SQLite: which file content is on stable storage, and what a power cut leaves of it.

Theory of operation. SQLite reaches its files through the VFS of its library, a table of functions. While a ``Disk`` is
mounted, that table opens files whose functions for writing, truncating and syncing notify the disk first. So the disk
knows what was written since the last sync of each file. After a power cut any of that may be there or not, in pieces of
a sector; synced data is there. The code above is unmodified: if it forgets a sync, its data is lost.

Formats: sqlite.org/c3ref/vfs.html and sqlite.org/c3ref/io_methods.html.
"""

import _sqlite3
import ctypes
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

SECTOR_BYTES = 512
ARRIVES_SHARES = 0.0, 0.5, 1.0
"""Shares of the unsynced writes that reach the disk: none, some sectors, all."""
FULL = sqlite3.SQLITE_FULL

_Pointer: Final = ctypes.c_void_p
# The name as a pointer: SQLite's own functions keep it, and read what follows it in memory.
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, _Pointer, ctypes.c_int, _Pointer)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, ctypes.c_int, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_int)


class _Vfs(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("file_bytes", ctypes.c_int),
        ("path_bytes_max", ctypes.c_int),
        ("next", _Pointer),
        ("name", ctypes.c_char_p),
        ("data", _Pointer),
        ("open", _OPEN),
    )


class _Methods(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("close", _Pointer),
        ("read", _Pointer),
        ("write", _WRITE),
        ("truncate", _TRUNCATE),
        ("sync", _SYNC),
        ("others", _Pointer * 13),
    )


class _Write(NamedTuple):
    """``data`` was written at ``place``; None: the file was truncated there."""

    place: int
    data: bytes | None


class _File:
    """``stable``: the content at the last sync. ``writes``: those since then."""

    def __init__(self, stable: bytes, written_at: int) -> None:
        self.stable = bytearray(stable)
        self.writes: list[_Write] = []
        self.first_written_at = written_at

    def sync(self) -> None:
        for write in self.writes:
            _apply(self.stable, write)
        self.writes.clear()

    def after_a_power_cut(self, chance: random.Random) -> bytes:
        content = bytearray(self.stable)
        share = chance.choice(ARRIVES_SHARES)
        for write in self.writes:
            for piece in _pieces(write):
                if chance.random() < share:
                    _apply(content, piece)
        return bytes(content)


def _pieces(write: _Write) -> list[_Write]:
    place, data = write
    if data is None:
        return [write]
    ends = [*range(place + SECTOR_BYTES - place % SECTOR_BYTES, place + len(data), SECTOR_BYTES), place + len(data)]
    starts = [place, *ends[:-1]]
    return [_Write(start, data[start - place : end - place]) for start, end in zip(starts, ends, strict=True)]


def _apply(content: bytearray, write: _Write) -> None:
    place, data = write
    if data is None:
        del content[place:]
        return
    content.extend(bytes(max(0, place - len(content))))
    content[place : place + len(data)] = data


class Disk:
    """A simulated disk, mounted inside its block. ``is_full``: every write fails. Serves the thread that mounted it."""

    def __init__(self) -> None:
        self.is_full = False
        self.failures: list[BaseException] = []
        """Exceptions of the functions that ``at`` called."""
        self._files: dict[str, _File] = {}
        self._open: dict[int, _File] = {}
        self._kept: list[object] = []
        """Objects to which SQLite has pointers."""
        self._operations_left = 0
        self._happens: Callable[[], None] | None = None

    def at(self, operation: int, happens: Callable[[], None]) -> None:
        """Call ``happens`` right before that write or sync, counted from now on."""
        self._operations_left, self._happens = operation, happens

    def not_any_more(self) -> None:
        """Cancel ``at``."""
        self._operations_left = 0

    # -- what it leaves -------------------------------------------------------------------------------------------

    def cut_power(self, folder: Path, target: Path, chance: random.Random) -> None:
        """Leave in ``target`` what a power cut leaves in ``folder``. A changed file may have its former time."""
        shutil.copytree(folder, target)
        for name, file in self._files.items():
            path = Path(name)
            if path.parent == folder and path.exists():
                there = target / path.name
                there.write_bytes(file.after_a_power_cut(chance))
                if chance.random() < 0.5:
                    os.utime(there, ns=(file.first_written_at, file.first_written_at))

    # -- what SQLite asks of it -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
        self._vfs: Any = library.sqlite3_vfs_find(None).contents
        # Cast makes a copy: the field itself is about to be another function.
        self._former_open: Any = ctypes.cast(self._vfs.open, _OPEN)
        opening = _OPEN(self._opened)
        self._kept.append(opening)
        self._vfs.open = opening
        return self

    def __exit__(self, *_: object) -> None:
        self._vfs.open = self._former_open

    def _opened(self, vfs: Any, name: int | None, file: Any, flags: int, flags_out: Any) -> int:
        path = None if name is None else os.fsdecode(ctypes.string_at(name))
        known = path is not None and Path(path).exists()
        status: int = self._former_open(vfs, name, file, flags, flags_out)
        if status == sqlite3.SQLITE_OK and path is not None:
            there = Path(path)
            stored = _File(there.read_bytes() if known else b"", there.stat().st_mtime_ns)
            self._files[path] = self._open[file] = stored
            self._watch(file)
        return status

    def _watch(self, file: Any) -> None:
        """Give the open ``file`` functions that notify the disk first."""
        pointer = ctypes.cast(file, ctypes.POINTER(ctypes.POINTER(_Methods)))
        own = _Methods.from_buffer_copy(pointer.contents.contents)
        write, truncate = ctypes.cast(own.write, _WRITE), ctypes.cast(own.truncate, _TRUNCATE)

        def writing(file: Any, data: Any, size: int, place: int) -> int:
            self._count()
            if self.is_full:
                return FULL
            self._open[file].writes.append(_Write(place, ctypes.string_at(data, size)))
            return int(write(file, data, size, place))

        def truncating(file: Any, size: int) -> int:
            self._open[file].writes.append(_Write(size, None))
            return int(truncate(file, size))

        def syncing(file: Any, flags: int) -> int:
            self._count()
            self._open[file].sync()
            return sqlite3.SQLITE_OK  # the physical disk is not involved

        functions = _WRITE(writing), _TRUNCATE(truncating), _SYNC(syncing)
        own.write, own.truncate, own.sync = functions
        self._kept += [own, write, truncate, *functions]
        pointer[0] = ctypes.pointer(own)

    def _count(self) -> None:
        self._operations_left -= 1
        if self._operations_left == 0 and self._happens is not None:
            try:
                self._happens()
            except BaseException as error:  # the caller is SQLite, which has no exceptions
                self.failures.append(error)
