"""Prepares a restored copy of the store for its use: checks it, and raises what must never decrease.

A backup is older than the store that it replaces. So the numbers that grow with each use would be given out a second
time. Other systems compare fencing tokens of locks, and a proxy compares the epochs of queues. Both continue far above
every number that the lost store can have given out.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from popgate.adapters.sqlite.failures import storage_failure
from popgate.adapters.sqlite.schema import APPLICATION_ID, SCHEMA_VERSION
from popgate.domain.errors import StartupError

FENCE_STEP = 1 << 36
"""Added to the next fencing token. A proxy that grants 1,000 locks a second gives out as many tokens in two years. JSON
numbers stay exact for 100,000 restores."""
EPOCH_STEP = 1 << 20
"""Added to the epoch of each queue, which increases by one whenever a proxy claims the queue."""
LOCKS_SCHEMA = 4
"""The first schema version with fencing tokens."""


def check_store(file: Path) -> None:
    """Check the structure of a copy of the store, and that this version of popgate can use it.

    Raises: StartupError.
    """
    try:
        with closing(_read_only(file)) as connection:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application_id != APPLICATION_ID:
                raise StartupError(f"{file} is not a store of popgate")
            if version > SCHEMA_VERSION:
                raise StartupError(
                    f"a newer popgate wrote the backup (schema {version}, this one knows {SCHEMA_VERSION}): restore it "
                    "with that version"
                )
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise StartupError(f"{file} is damaged ({' '.join(found.split())}): use another backup")
    except sqlite3.Error as error:
        raise _failure(error, file) from error


def raise_numbers(file: Path) -> None:
    """Raise the fencing tokens and the epochs in a copy of the store, and sync the file. Raises: StartupError."""
    try:
        with closing(_connection(file)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE lease_queue SET epoch = epoch + ?", (EPOCH_STEP,))
            if version >= LOCKS_SCHEMA:
                connection.execute("UPDATE lock_fence SET next_token = next_token + ?", (FENCE_STEP,))
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise _failure(error, file) from error


def fold_log(file: Path) -> None:
    """Write the write-ahead log of a copied store into the file, so that the file alone is the store.

    Raises: StartupError.
    """
    try:
        with closing(_connection(file)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise _failure(error, file) from error


def schema_of(file: Path) -> int:
    """Return the schema version of a copy of the store. Raises: StartupError."""
    try:
        with closing(_read_only(file)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            return int(version)
    except sqlite3.Error as error:
        raise _failure(error, file) from error


def _read_only(file: Path) -> sqlite3.Connection:
    """Return a connection that makes no other file, not even a write-ahead log."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)


def _connection(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()  # no shared memory file
    return connection


def _failure(error: sqlite3.Error, file: Path) -> StartupError:
    failure = storage_failure(error, file)
    return StartupError(f"{file} can't be used ({error})" if failure is None else failure.detail)
