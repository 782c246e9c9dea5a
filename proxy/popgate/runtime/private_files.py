"""Reads and replaces files that other users of the machine must not read, such as API keys and secrets.

A file is private if it belongs to the user of this process or to root, and if no other user may read it. A file of root
may also be readable by its group, if this process runs as another user: Kubernetes mounts a secret this way.

Symbolic links are followed, because Kubernetes also uses links to change a secret.
"""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from popgate.runtime.stable_files import sync_folder

BYTES_MAX = 1024 * 1024
"""Maximum size of a private file, in bytes, unless the reader permits more."""
LOCK_SECONDS_MAX = 10.0
"""Maximum seconds to wait while another process changes the same file."""

_LOCK_LOOK_SECONDS = 0.05


class PrivateFileError(ValueError):
    """A private file can't be used. The text is one line that names the file and says what to do."""


def read_private(file: Path, *, bytes_max: int = BYTES_MAX, as_administrator: bool = False) -> bytes:
    """Return the content of a private file.

    ``as_administrator``: if this process is root, also accept a file of a proxy that runs as another user. Such a file
    belongs to that user, or to root and a group. Raises: PrivateFileError.
    """
    try:
        # O_NONBLOCK: opening a named pipe would wait for a writer
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise PrivateFileError(_not_opened(file, error)) from error
    try:
        _check(file, os.fstat(descriptor), bytes_max, as_administrator=as_administrator)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            content = stream.read(bytes_max + 1)
    except OSError as error:
        raise PrivateFileError(f"{file} can't be read ({error.strerror})") from error
    finally:
        os.close(descriptor)
    if len(content) > bytes_max:  # it grows
        raise PrivateFileError(_too_large(file, bytes_max))
    return content


def _check(file: Path, status: os.stat_result, bytes_max: int, *, as_administrator: bool) -> None:
    user, owner, mode = os.geteuid(), status.st_uid, stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise PrivateFileError(f"{file} is not a file; name a file")
    if status.st_size > bytes_max:
        raise PrivateFileError(_too_large(file, bytes_max))
    by_root = as_administrator and user == 0
    if owner not in (user, 0) and not by_root:
        raise PrivateFileError(
            f"{file} belongs to another user (uid {owner}), who can read and change it; run: chown {user} {file}"
        )
    for_group = owner == 0 and (user != 0 or by_root)
    if mode & (0o037 if for_group else 0o077):
        remedy = f"chmod 640 {file}" if owner == 0 != user else f"chmod 600 {file}"
        raise PrivateFileError(f"{file} can be read or changed by other users (mode {mode:04o}); run: {remedy}")


def _not_opened(file: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} does not exist; create it, or name another file"
    if isinstance(error, PermissionError):
        return f"{file} can't be read by this user (uid {os.geteuid()}); run: chown {os.geteuid()} {file}"
    reason = error.strerror if isinstance(error, OSError) else error
    return f"{file} can't be opened ({reason}); name a file"


def _too_large(file: Path, bytes_max: int) -> str:
    return f"{file} is larger than {bytes_max} bytes; name the right file"


def replace_private(file: Path, content: bytes) -> None:
    """Write a private file atomically and stably. A symbolic link stays one, and its target is replaced.

    A new file can be read by its owner only. If this process is root, a replaced file keeps its owner and its group,
    and the group can read the file if it could before. Raises: PrivateFileError.
    """
    try:
        _replace(_target(file), content)
    except OSError as error:
        raise PrivateFileError(f"{file} can't be written ({error.strerror}); check its folder") from error


def _replace(target: Path, content: bytes) -> None:
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            if os.geteuid() == 0:
                with suppress(FileNotFoundError):
                    old = target.stat()
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                    os.fchmod(descriptor, 0o600 | (old.st_mode & stat.S_IRGRP))
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync_folder(target.parent)


@contextmanager
def locked_private(file: Path) -> Generator[None]:
    """Within the context, no other process is in this context for a file of the same folder.

    So two processes that read, change and replace the file don't lose a change. The lock is on the folder, which exists
    even if the file doesn't. It ends with the process. Raises: PrivateFileError if another process keeps the lock.
    """
    try:
        folder = _target(file).parent
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PrivateFileError(f"the folder of {file} can't be opened ({error.strerror}); create it") from error
    try:
        until = time.monotonic() + LOCK_SECONDS_MAX
        while not _try_lock(file, descriptor):
            if time.monotonic() > until:
                raise PrivateFileError(f"another process is changing a file in {folder}; try again later")
            time.sleep(_LOCK_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(file: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise PrivateFileError(f"the folder of {file} can't be locked ({error.strerror})") from error
    return True


def _target(file: Path) -> Path:
    """Return the path of the file to which all symbolic links lead. Raises: OSError."""
    return Path(os.path.realpath(file))
