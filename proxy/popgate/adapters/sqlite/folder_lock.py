"""Ensures that only one process uses a data folder, with an advisory lock on the file ``popgate.lock``.

The kernel releases the lock when the process exits.
"""

import fcntl
import os
from pathlib import Path

from popgate.domain.errors import StartupError

LOCK_FILE = "popgate.lock"
PID_BYTES_MAX = 32


class FolderLock:
    """Locks ``folder`` when it is constructed, until ``release`` is called. Creates the folder if necessary.

    The lock file is never deleted. Otherwise two processes could lock two different files with the same name.

    Raises: StartupError if another process holds the lock, with the id of this process, or if the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, PID_BYTES_MAX, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StartupError(
                f"another popgate (pid {holder}) uses the data folder {folder}: stop it, or choose another folder "
                "with --data-dir"
            ) from error
        except OSError as error:
            os.close(self._descriptor)
            raise _unusable(folder, error) from error

    def release(self) -> None:
        os.close(self._descriptor)


def _unusable(folder: Path, error: OSError) -> StartupError:
    return StartupError(
        f"popgate can't use the data folder {folder} ({error.strerror}): make it writable, or choose another one with "
        "--data-dir"
    )
