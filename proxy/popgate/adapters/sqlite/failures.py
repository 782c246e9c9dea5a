"""Translates errors of SQLite into texts that tell an operator which file failed, why, and what to do.

This module decides which errors may be retried. ``group_commit`` decides which jobs are rolled back.
"""

import sqlite3
from pathlib import Path

from popgate.domain.errors import RetryLater

RETRY_AFTER_SECONDS = 5.0
"""Seconds after which a client may retry. A full or failing disk is not repaired within one second."""


class StorageUnavailable(RetryLater):
    """The store can't run a job at present. Adapters translate this error into the error of their port.

    The job has changed nothing. The only exception is ``group_commit.UNDECIDED``: with this error, it is unknown
    whether the job was committed.
    """


def storage_failure(error: BaseException, path: Path) -> StorageUnavailable | None:
    """Return the failure of the disk or file that caused ``error``, or None if the job itself caused ``error``."""
    if not isinstance(error, sqlite3.Error):
        return None
    remedy = _remedy(error, path)
    return None if remedy is None else StorageUnavailable(remedy, retry_after_seconds=RETRY_AFTER_SECONDS)


def _remedy(error: sqlite3.Error, path: Path) -> str | None:
    name = _name(error)
    match name.split("_")[1] if "_" in name else "":
        case "FULL":
            return f"the disk that holds {path} is full: free some space; popgate then continues by itself"
        case "IOERR":
            return f"reading or writing {path} failed ({name}): check the disk, its free space and quotas"
        case "READONLY" | "PERM" | "AUTH" | "CANTOPEN":
            return f"{path} can't be opened for writing ({name}): check permissions and whether the disk is read-only"
        case "CORRUPT" | "NOTADB":
            return (
                f"{path} is damaged or not a database ({name}): keep a copy of it, then restore a backup or use "
                "another data folder"
            )
        case "BUSY" | "LOCKED" | "PROTOCOL":
            return f"{path} is locked by another program: close that program, popgate must be the only user of the file"
        case "NOLFS" | "TOOBIG" | "NOMEM":
            return f"SQLite could not handle {path} ({name}): check memory and file size limits"
        case _:
            return None


def _name(error: sqlite3.Error) -> str:
    # Exceptions that the Python module raises without an error of SQLite have no ``sqlite_errorname``.
    name: object = getattr(error, "sqlite_errorname", None)
    return name if isinstance(name, str) else ""
