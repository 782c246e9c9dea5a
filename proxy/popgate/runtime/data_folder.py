"""Manages the data folder: creates it, stores the secret in it, and records the broker of its lease records.

Lease records are valid for one broker only. On another broker, a message copy may have the same id as a copy that a
record shows as settled. popgate would then ack this copy without delivering it. So the first start records the broker
in the folder: the embedded broker, or a mark by which popgate recognizes the RabbitMQ broker.
"""

import os
import secrets
from pathlib import Path

from popgate.domain.errors import StartupError
from popgate.runtime.restoring import check_restored
from popgate.runtime.stable_files import check_file, checksum, make_stable_folder, write_stably

SECRET_FILE = "secret"
BROKER_FILE = "broker"
SECRET_LENGTH_MIN = 32


def make_folder(folder: Path) -> None:
    """Create the data folder if it is missing. Raises: StartupError.

    Root does not use a folder of another user, who could replace its files by links to files of root.
    """
    try:
        make_stable_folder(folder)
    except OSError as error:
        raise StartupError(
            f"the data folder {folder} can't be created ({error.strerror}); choose one with --data-dir"
        ) from error
    owner = folder.stat().st_uid
    if os.geteuid() == 0 != owner:
        raise StartupError(
            f"the data folder {folder} belongs to another user (uid {owner}): run popgate as that user, or run: "
            f"chown -R 0 {folder}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(f"the data folder {folder} is not writable; choose one with --data-dir")
    check_restored(folder)


def kept_secret(folder: Path) -> bytes:
    """Return the secret that is stored in the folder. Raises: StartupError.

    If there is no secret yet, create it. Only the owner of the file can read it.
    """
    secret = _kept(folder / SECRET_FILE, secrets.token_hex(SECRET_LENGTH_MIN))
    if len(secret) < SECRET_LENGTH_MIN:
        file = folder / SECRET_FILE
        raise StartupError(f"the secret in {file} is damaged; delete it (open receipt handles become invalid)")
    return secret.encode()


def bound_broker(folder: Path) -> str | None:
    """Return the broker that ``bind_broker`` recorded, or None if no broker is recorded. Raises: StartupError."""
    file = folder / BROKER_FILE
    return _checked(file) if file.exists() else None


def bind_broker(folder: Path, broker: str) -> None:
    """Record ``broker`` in the folder, unless a broker is already recorded. Raises: StartupError."""
    _kept(folder / BROKER_FILE, broker)


def _kept(file: Path, first: str) -> str:
    """Return the content of ``file``. If the file is missing, first create it atomically with the content ``first``.

    Only one process at a time uses the folder, because the process locks the store in the folder.
    """
    check = check_file(file)
    try:
        if not file.exists():
            check.unlink(missing_ok=True)
            write_stably(file, first)
        if not check.exists():  # also needed if an earlier version of popgate created the file
            write_stably(check, checksum(file))
    except OSError as error:
        raise StartupError(f"{file} can't be created ({error})") from error
    return _checked(file)


def _checked(file: Path) -> str:
    """Return the content of ``file``.

    Raises: StartupError if it can't be read, or if popgate did not write this content.
    """
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
