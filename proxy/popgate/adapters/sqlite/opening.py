"""Opens the store's file: checks it, tunes it, and explains in one clear line if it can't be used.

Never deletes or repairs anything by itself. A file of an older version is upgraded to this version, completely or not
at all.
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
"""Lowest SQLite version with RETURNING, partial-index upserts, and the error names that ``failures`` needs."""
LOCK_WAIT_SECONDS = 1.0
STATEMENTS_CACHED_MAX = 256
LOG_CHECK_BYTES_MAX = 64 * 1024 * 1024
FILE_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""Maximum number of bytes in a file that is given a checksum. The checksum of a larger file would delay the end of the
process."""
QUICK_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""Maximum number of bytes in a file that SQLite itself checks. A larger check would delay the start: for this size, it
takes half a second plus the time to read the file from the disk."""
_FILE_HEADER = Struct(">16xH6xII60xI")

_REMEDY = "keep a copy of it, then restore a backup or choose another data folder with --data-dir"

TUNING = (
    "PRAGMA page_size = 8192",  # a page holds seven messages of 1 KiB; affects only a new file
    "PRAGMA locking_mode = EXCLUSIVE",  # no shared memory file, and no access by other programs
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # one fsync per commit: answered writes are on stable storage
    "PRAGMA wal_autocheckpoint = 2000",  # 16 MiB: messages deleted while in the log never reach the main file
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
        # This write changes nothing. A file or disk that can't be written must fail here.
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
        for statement in SCHEMA:  # one by one: executescript would commit first, but creation must be atomic
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
    """Record the checksum of the store's file, which is closed.

    It is valid until the file is next opened or written to.

    Raises: OSError.
    """
    if path.stat().st_size <= FILE_CHECK_BYTES_MAX:
        write_stably(check_file(path), f"{path.stat().st_mtime_ns} {checksum(path)}")


def _forget_closed(path: Path) -> None:
    """Delete the file's checksum, because the file is about to be written to.

    The file's time can't replace this step. After a power cut, the file may have its former time although its content
    has changed, because SQLite syncs only the content.

    Raises: OSError.
    """
    check = check_file(path)
    if check.exists():
        check.unlink()
        sync_folder(path.parent)


def _check_files(path: Path) -> bool:
    """Return whether the file is certainly unchanged since popgate closed it.

    Raises: StartupError if the file or its log is damaged.
    """
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
    """Return the size in the file's header, or 0 if the header is outdated.

    SQLite itself does not notice that whole pages are missing at the end.
    """
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
