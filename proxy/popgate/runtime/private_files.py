"""Reads and replaces files that other users of the machine must not read, such as API keys and secrets.

A file is private if it belongs to the user of this process or to root, and if no other user may read it. A file of root
may also be readable by its group, if this process runs as another user: Kubernetes mounts a secret this way.

Symbolic links are followed, because Kubernetes also uses links to change a secret. But root creates no file through a
link of another user.
"""

import errno
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
"""Maximum size of a private file, in bytes, unless its reader and its writer permit more."""
LOCK_SECONDS_MAX = 10.0
"""Maximum seconds to wait while another process changes the same file."""

_LOCK_LOOK_SECONDS = 0.05
_LINKS_MAX = 40
"""Maximum number of links on the way to a file, as in Linux."""


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
    if not stat.S_ISREG(status.st_mode):
        raise PrivateFileError(f"{file} is not a file; name a file")
    if status.st_size > bytes_max:
        raise PrivateFileError(_too_large(file, bytes_max))
    if (problem := exposure(file, status, as_administrator=as_administrator)) is not None:
        raise PrivateFileError(problem)


def exposure(place: Path, status: os.stat_result, *, as_administrator: bool = False) -> str | None:
    """Return why a file or a folder is not private, with the remedy; None if it is private.

    A folder of root may also be changed by its group if this process runs as another user, which needs that.
    ``as_administrator`` as for ``read_private``.
    """
    user, owner, mode = os.geteuid(), status.st_uid, stat.S_IMODE(status.st_mode)
    is_folder = stat.S_ISDIR(status.st_mode)
    by_root = as_administrator and user == 0
    if owner not in (user, 0) and not by_root:
        return f"{place} belongs to another user (uid {owner}), who can read and change it; run: chown {user} {place}"
    for_group = owner == 0 and (user != 0 or by_root)
    if not mode & ((0o007 if is_folder else 0o037) if for_group else 0o077):
        return None
    to_owner, to_group = (0o700, 0o770) if is_folder else (0o600, 0o640)
    remedy = f"chmod {to_group if owner == 0 != user else to_owner:o} {place}"
    return f"{place} can be read or changed by other users (mode {mode:04o}); run: {remedy}"


def _not_opened(file: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} does not exist; create it, or name another file"
    if isinstance(error, PermissionError):
        return f"{file} can't be read by this user (uid {os.geteuid()}); run: chown {os.geteuid()} {file}"
    reason = error.strerror if isinstance(error, OSError) else error
    return f"{file} can't be opened ({reason}); name a file"


def _too_large(file: Path, bytes_max: int) -> str:
    return f"{file} is larger than {bytes_max} bytes; name the right file"


def replace_private(file: Path, content: bytes, *, bytes_max: int = BYTES_MAX) -> None:
    """Write a private file atomically and stably. A symbolic link stays one, and its target is replaced.

    A new file can be read by its owner only. If this process is root, a replaced file keeps its owner and its group,
    and the group can read the file if it could before. Raises: PrivateFileError, also if the content is
    larger than ``bytes_max``, so that ``read_private`` could not read it.
    """
    if len(content) > bytes_max:
        raise PrivateFileError(f"{file} would be larger than {bytes_max} bytes, so it is not changed; shorten it first")
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
    """Within the context, no other process is in this context for the same file.

    So two processes that read, change and replace the file don't lose a change. The lock is on a file beside it, which
    exists only meanwhile, and which only its owner and root can open. A lock on the folder could be held by any user
    who can read the folder. The lock ends with the process. Raises: PrivateFileError if another process keeps the lock.
    """
    try:
        target = _target(file)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PrivateFileError(f"the folder of {file} can't be opened ({error.strerror}); create it") from error
    try:
        lock = target.with_name(f".{target.name}.lock")
        descriptor = _locked(file, lock, folder)
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(lock.name, dir_fd=folder)  # before the lock ends: no other process removes this file
            os.close(descriptor)
    finally:
        os.close(folder)


def _locked(file: Path, lock: Path, folder: int) -> int:
    """Wait for the lock, and return the open lock file. ``folder`` is the open folder. Raises: PrivateFileError."""
    until = time.monotonic() + LOCK_SECONDS_MAX
    while True:
        try:
            descriptor = _try_lock(lock, folder)
        except OSError as error:
            raise PrivateFileError(f"{file} can't be locked: {lock} can't be opened ({error.strerror})") from error
        if descriptor is not None:
            return descriptor
        if time.monotonic() > until:
            raise PrivateFileError(f"another process is changing {file}; try again later")
        time.sleep(_LOCK_LOOK_SECONDS)


def _try_lock(lock: Path, folder: int) -> int | None:
    """Return the open lock file, which is locked, or None if it can't be locked now. Raises: OSError."""
    descriptor = _open_lock(lock, folder)
    if descriptor is None:
        return None
    is_locked = False
    try:
        own = os.fstat(descriptor)
        owners = {os.geteuid()} if os.geteuid() else {0, os.fstat(folder).st_uid}
        if not stat.S_ISREG(own.st_mode) or own.st_uid not in owners or own.st_mode & 0o077:
            raise PrivateFileError(f"{lock} is not private, so other users could keep the lock; remove {lock}")
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(lock.name, dir_fd=folder, follow_symlinks=False)
            # the process that had the lock before may have removed the file that is locked now
            is_locked = (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


def _open_lock(lock: Path, folder: int) -> int | None:
    """Open the lock file, which is created if it is missing. Return None if it was removed meanwhile.

    A file that root creates belongs to the owner of the folder, so that this user can wait for the lock, and can use a
    file that a killed process left. An existing file keeps its owner: it may be a hard link to another file.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(lock.name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except FileExistsError:
        try:
            return os.open(lock.name, flags, dir_fd=folder)
        except FileNotFoundError:
            return None
    if os.geteuid() == 0:
        owner = os.fstat(folder)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def _target(file: Path) -> Path:
    """Return the path of the file to which all symbolic links lead.

    If this process is root, all links must belong to root. Otherwise another user could choose which file root creates
    or changes. Raises: OSError, PrivateFileError.
    """
    target = Path(os.path.realpath(file))
    if os.geteuid() == 0 and (link := _foreign_link(file)) is not None:
        raise PrivateFileError(
            f"{link} is a link of another user (uid {link.lstat().st_uid}), which root does not follow to write a "
            f"file; name the file itself: {target}"
        )
    return target


def _foreign_link(file: Path) -> Path | None:
    """Return the first link on the way to a file that does not belong to root. Raises: OSError."""
    place, rest, links = Path("/"), [*reversed(file.absolute().parts[1:])], 0
    while rest:
        name = rest.pop()
        if name == "..":
            place = place.parent
            continue
        try:
            status = (place / name).lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            place /= name
            continue
        if status.st_uid != 0:
            return place / name
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
        to = (place / name).readlink()
        rest += reversed(to.parts[1:] if to.is_absolute() else to.parts)
        place = Path("/") if to.is_absolute() else place
    return None
