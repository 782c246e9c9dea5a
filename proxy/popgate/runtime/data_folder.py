"""The data folder: makes it, keeps the secret in it, and remembers which broker its records speak of.

Lease records mean nothing beside another broker's messages: a copy that was settled on one would be acked unseen on the
other. So the folder is bound to its broker at the first start: to the embedded one, or to a mark left on RabbitMQ.
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
    """Raises: StartupError."""
    try:
        make_stable_folder(folder)
    except OSError as error:
        raise StartupError(
            f"the data folder {folder} can't be made ({error.strerror}); choose one with --data-dir"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(f"the data folder {folder} is not writable; choose one with --data-dir")


def kept_secret(folder: Path) -> bytes:
    """The secret in the folder, made at the first start and readable by its owner only. Raises: StartupError."""
    secret = _kept(folder / SECRET_FILE, secrets.token_hex(SECRET_LENGTH_MIN))
    if len(secret) < SECRET_LENGTH_MIN:
        file = folder / SECRET_FILE
        raise StartupError(f"the secret in {file} is damaged; delete it (open receipt handles become invalid)")
    return secret.encode()


def bound_broker(folder: Path) -> str | None:
    """What ``bind_broker`` was told; None before. Raises: StartupError."""
    file = folder / BROKER_FILE
    return _checked(file) if file.exists() else None


def bind_broker(folder: Path, broker: str) -> None:
    """Remember ``broker``, once. Raises: StartupError."""
    _kept(folder / BROKER_FILE, broker)


def _kept(file: Path, first: str) -> str:
    """What stands in ``file``, which is made with ``first`` where it is missing: whole or not at all.

    One process at a time works in the folder: the store in it is locked.
    """
    check = check_file(file)
    try:
        if not file.exists():
            check.unlink(missing_ok=True)
            write_stably(file, first)
        if not check.exists():  # also in a folder of a popgate that made none
            write_stably(check, checksum(file))
    except OSError as error:
        raise StartupError(f"{file} can't be made ({error})") from error
    return _checked(file)


def _checked(file: Path) -> str:
    """What stands in ``file``. Raises: StartupError where that is not what popgate wrote."""
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
