"""Manages the data folder: creates it, stores the secret in it, and records the broker of its lease records.

Lease records are valid for one broker only. With another broker, popgate would mistake a copy with the id of a settled
copy for the settled one, and ack it without delivering it. So the first start binds the folder to its broker: to the
embedded broker, or to a mark that it leaves on RabbitMQ.
"""

import os
import secrets
from pathlib import Path

from popgate.domain.errors import StartupError
from popgate.runtime.stable_files import check_file, checksum, make_stable_folder, write_stably

SECRET_FILE = "secret"
BROKER_FILE = "broker"
SECRET_LENGTH_MIN = 32


def make_folder(folder: Path) -> None:
    """Create the data folder if it is missing. Raises: StartupError."""
    try:
        make_stable_folder(folder)
    except OSError as error:
        raise StartupError(
            f"the data folder {folder} can't be created ({error.strerror}); choose one with --data-dir"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(f"the data folder {folder} is not writable; choose one with --data-dir")


def kept_secret(folder: Path) -> bytes:
    """Return the secret in the folder. The first start creates it, readable by its owner only. Raises: StartupError."""
    secret = _kept(folder / SECRET_FILE, secrets.token_hex(SECRET_LENGTH_MIN))
    if len(secret) < SECRET_LENGTH_MIN:
        file = folder / SECRET_FILE
        raise StartupError(f"the secret in {file} is damaged; delete it (open receipt handles become invalid)")
    return secret.encode()


def bound_broker(folder: Path) -> str | None:
    """Return the broker that ``bind_broker`` recorded, or None if there is none yet. Raises: StartupError."""
    file = folder / BROKER_FILE
    return _checked(file) if file.exists() else None


def bind_broker(folder: Path, broker: str) -> None:
    """Record ``broker``, unless the folder already has a broker. Raises: StartupError."""
    _kept(folder / BROKER_FILE, broker)


def _kept(file: Path, first: str) -> str:
    """Return the content of ``file``. If it is missing, write it atomically with the content ``first``.

    Only one process at a time uses the folder, because the store in it is locked.
    """
    check = check_file(file)
    try:
        if not file.exists():
            check.unlink(missing_ok=True)
            write_stably(file, first)
        if not check.exists():  # also needed if an earlier popgate created the folder without checksums
            write_stably(check, checksum(file))
    except OSError as error:
        raise StartupError(f"{file} can't be created ({error})") from error
    return _checked(file)


def _checked(file: Path) -> str:
    """Return the content of ``file``. Raises: StartupError if popgate did not write this content."""
    check = check_file(file)
    try:
        if check.exists() and check.read_text() != checksum(file):
            raise StartupError(
                f"{file} has been changed or damaged: restore it from a backup, or, if the change is yours, delete "
                f"{check}"
            )
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} can't be read ({error})") from error
