"""Opening the file: what it must be, how it is tuned, and one clear line where it can't serve.

Never deletes or repairs anything by itself. A file of an older version is brought up to this one, all or nothing.
"""

import sqlite3
from pathlib import Path

from popgate.adapters.sqlite.failures import storage_failure
from popgate.adapters.sqlite.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION, UPGRADES
from popgate.domain.errors import StartupError

SQLITE_VERSION_MIN = (3, 35, 0)
"""RETURNING, partial-index upserts and the error names that the translation needs."""
LOCK_WAIT_SECONDS = 1.0
STATEMENTS_CACHED_MAX = 256
QUICK_CHECK_BYTES_MAX = 64 * 1024 * 1024

TUNING = (
    "PRAGMA page_size = 8192",  # seven messages of 1 KiB a page; has effect on a new file only
    "PRAGMA locking_mode = EXCLUSIVE",  # no shared memory file, and nobody else gets in between
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # an fsync a commit: what is answered is on stable storage
    "PRAGMA wal_autocheckpoint = 2000",  # 16 MiB: messages that come and go within it never reach the main file
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",  # 32 MiB
    "PRAGMA mmap_size = 0",  # a failing disk must be an error, not a SIGBUS
    "PRAGMA temp_store = MEMORY",
    "PRAGMA secure_delete = OFF",  # Debian's default of ON writes every freed page once more
)


def open_connection(path: Path) -> sqlite3.Connection:
    """Open or create the store at ``path``, for use by the calling thread only. Raises: StartupError."""
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        wanted = ".".join(map(str, SQLITE_VERSION_MIN))
        raise StartupError(f"popgate needs SQLite {wanted} or newer, not {sqlite3.sqlite_version}: upgrade the library")
    unclean = _size(path.with_name(path.name + "-wal")) > 0
    connection: sqlite3.Connection | None = None
    try:
        path.touch(mode=0o600)  # messages are nobody else's business; SQLite gives its log the same mode
        connection = sqlite3.connect(
            path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, cached_statements=STATEMENTS_CACHED_MAX
        )
        for pragma in TUNING:
            connection.execute(pragma).fetchall()
        _check_identity(connection, path)
        # SQLite itself survives any crash of this process. After a crash of the machine a disk that lied about its
        # fsyncs may have left damage, which is better found now than in a pop; a large file would take too long.
        if unclean and _size(path) <= QUICK_CHECK_BYTES_MAX:
            _quick_check(connection, path)
        # A write that changes nothing on purpose: a file or disk that can't be written must fail here.
        connection.execute("UPDATE store SET high_water = high_water")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError):
            raise StartupError(f"popgate can't write {path} ({error.strerror}): make it writable") from error
        failure = storage_failure(error, path)
        if failure is None:
            raise
        raise StartupError(failure.detail) from error
    return connection


def _check_identity(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables == 0 and version == 0:
        for statement in SCHEMA:  # one by one: executescript would commit first, and creation must be all or nothing
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        version = 1
    elif application_id != APPLICATION_ID:
        raise StartupError(f"{path} belongs to another program: choose another data folder with --data-dir")
    elif version > SCHEMA_VERSION:
        raise StartupError(
            f"{path} was written by a newer popgate (schema {version}, this one knows {SCHEMA_VERSION}): start that "
            "version again, or choose another data folder with --data-dir"
        )
    for number in range(version + 1, SCHEMA_VERSION + 1):
        for statement in UPGRADES[number]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number}")
    connection.execute("COMMIT")


def _quick_check(connection: sqlite3.Connection, path: Path) -> None:
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        found = " ".join(found.split())
        raise StartupError(
            f"{path} is damaged ({found}): keep a copy of it, then restore a backup or choose another data folder with "
            "--data-dir"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
