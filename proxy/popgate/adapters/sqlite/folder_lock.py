"""Ensures that only one process uses a data folder, with an advisory lock on the file ``popgate.lock``.

The kernel releases the lock when the process exits.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from popgate.domain.errors import StartupError

LOCK_FILE = "popgate.lock"
PID_BYTES_MAX = 32

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderLock:
    """Locks ``folder`` when it is constructed, until ``release`` is called. Creates the folder if necessary.

    The lock file is never deleted. Otherwise two processes could lock two different files with the same name.

    Raises: StartupError if another process holds the lock, with the id of this process, or if the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            in_use = _in_use(folder, self._descriptor)
            os.close(self._descriptor)
            raise in_use from error
        except OSError as error:
            os.close(self._descriptor)
            raise _unusable(folder, error) from error

    def release(self) -> None:
        os.close(self._descriptor)


@contextmanager
def unused(folder: Path) -> Generator[None]:
    """Within the context, no proxy uses ``folder``. This changes nothing in the folder, which may be another user's.

    Raises: StartupError if a proxy uses it; OSError if no proxy has ever used it.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | _FLAGS)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(folder, descriptor) from error
        yield
    finally:
        os.close(descriptor)


def _in_use(folder: Path, descriptor: int) -> StartupError:
    holder = os.pread(descriptor, PID_BYTES_MAX, 0).decode(errors="replace").strip() or "unknown"
    return StartupError(
        f"another popgate (pid {holder}) uses the data folder {folder}: stop it, or choose another folder with "
        "--data-dir"
    )


def _unusable(folder: Path, error: OSError) -> StartupError:
    return StartupError(
        f"popgate can't use the data folder {folder} ({error.strerror}): make it writable, or choose another one with "
        "--data-dir"
    )
