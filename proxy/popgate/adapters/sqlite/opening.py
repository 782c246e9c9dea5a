"""Opens the file: checks it, tunes it, and reports in one clear line why it can't be used.

Never deletes or repairs anything by itself. A file of an older version is upgraded to this one, all or nothing.
"""

import os
import sqlite3
from pathlib import Path
from struct import Struct

from popgate.adapters.sqlite.failures import storage_failure
from popgate.adapters.sqlite.log_check import damage_in
from popgate.adapters.sqlite.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION, UPGRADES
from popgate.domain.errors import StartupError
from popgate.runtime.stable_files import check_file, checksum, sync_folder, write_stably

SQLITE_VERSION_MIN = (3, 35, 0)
"""Lowest SQLite version with RETURNING, partial-index upserts and the error names that the translation needs."""
LOCK_WAIT_SECONDS = 1.0
STATEMENTS_CACHED_MAX = 256
LOG_CHECK_BYTES_MAX = 64 * 1024 * 1024
FILE_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""Of larger files no checksum is kept: to make it would hold up the end of the process."""
QUICK_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""SQLite's own check of a larger file would hold up the start: it takes half a second for that much, and what the disk
needs to read it."""
_FILE_HEADER = Struct(">16xH6xII60xI")

_REMEDY = "keep a copy of it, then restore a backup or choose another data folder with --data-dir"

TUNING = (
    "PRAGMA page_size = 8192",  # seven messages of 1 KiB a page; affects only a new file
    "PRAGMA locking_mode = EXCLUSIVE",  # no shared memory file, and no access by other programs
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # one fsync per commit: answered writes are on stable storage
    "PRAGMA wal_autocheckpoint = 2000",  # 16 MiB: messages that come and go within it never reach the main file
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",  # 32 MiB
    "PRAGMA mmap_size = 0",  # a failing disk must cause an error, not a SIGBUS
    "PRAGMA temp_store = MEMORY",
    "PRAGMA secure_delete = OFF",  # Debian's default of ON writes every freed page once more
)


def open_connection(path: Path) -> sqlite3.Connection:
    """Open or create the store at ``path``, for use by the calling thread only. Raises: StartupError."""
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        wanted = ".".join(map(str, SQLITE_VERSION_MIN))
        raise StartupError(f"popgate needs SQLite {wanted} or newer, not {sqlite3.sqlite_version}: upgrade the library")
    connection: sqlite3.Connection | None = None
    try:
        is_whole = _check_files(path)
        _forget_closed(path)
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        )  # not readable by others; SQLite's log gets the same mode
        connection = sqlite3.connect(
            path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, cached_statements=STATEMENTS_CACHED_MAX
        )
        for pragma in TUNING:
            connection.execute(pragma).fetchall()
        _check_identity(connection, path)
        if not is_whole and path.stat().st_size <= QUICK_CHECK_BYTES_MAX:
            _quick_check(connection, path)
        # A write that changes nothing: a file or disk that can't be written must fail here.
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


def note_closed(path: Path) -> None:
    """Note the checksum of the store's file, which is closed. It counts until the file is opened or written to.

    Raises: OSError.
    """
    if path.stat().st_size <= FILE_CHECK_BYTES_MAX:
        write_stably(check_file(path), f"{path.stat().st_mtime_ns} {checksum(path)}")


def _forget_closed(path: Path) -> None:
    """The file is about to be written to, and after a power cut it may have its former time all the same: SQLite syncs
    content alone. Raises: OSError."""
    check = check_file(path)
    if check.exists():
        check.unlink()
        sync_folder(path.parent)


def _check_files(path: Path) -> bool:
    """Return whether the file is certainly as popgate closed it. Raises: StartupError if it or its log is damaged."""
    log, check = path.with_name(path.name + "-wal"), check_file(path)
    damage = damage_in(log, bytes_max=LOG_CHECK_BYTES_MAX)
    if damage is not None:
        raise StartupError(f"{log} is damaged ({damage}): {_REMEDY}")
    if not path.exists():
        return False
    if not (log.exists() and log.stat().st_size) and path.stat().st_size < _least_size(path):
        raise StartupError(f"{path} is damaged (it has been cut off): {_REMEDY}")
    if not check.exists():
        return False
    written_at, _, closed = check.read_text().partition(" ")
    if written_at != f"{path.stat().st_mtime_ns}":
        return False
    if checksum(path) != closed:
        raise StartupError(f"{path} is damaged (it has changed since popgate closed it): {_REMEDY}")
    return True


def _least_size(path: Path) -> int:
    """Return the size in the file's header, or 0 if it is outdated. SQLite itself checks whole pages only."""
    with path.open("rb") as stream:
        header = stream.read(_FILE_HEADER.size)
    if len(header) < _FILE_HEADER.size:
        return 0
    page_size, changed, pages, valid_for = _FILE_HEADER.unpack(header)
    return pages * (page_size if page_size > 1 else 65_536) if changed == valid_for else 0


def _quick_check(connection: sqlite3.Connection, path: Path) -> None:
    """Run SQLite's check of the structure, not of the content. Raises: StartupError if it finds damage."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StartupError(f"{path} is damaged ({' '.join(found.split())}): {_REMEDY}")
