"""Opens the store's file: checks it, upgrades it, and configures SQLite.

If the file can't be used, a ``StartupError`` explains the reason and the remedy in one line. popgate never deletes or
repairs the file. A file of an older schema version is upgraded in one transaction, completely or not at all.
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
"""Lowest version of SQLite that supports RETURNING, which popgate needs."""
LOCK_WAIT_SECONDS = 1.0
STATEMENTS_CACHED_MAX = 256
LOG_CHECK_BYTES_MAX = 64 * 1024 * 1024
FILE_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size in bytes of a file whose checksum popgate records when it closes the file. The checksum of a larger file
would delay the exit of the process."""
QUICK_CHECK_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size in bytes of a file that popgate checks with SQLite's ``quick_check`` at the start. The check of a file
of this size takes half a second, plus the time to read the file from the disk. The check of a larger file would delay
the start."""
_FILE_HEADER = Struct(">16xH6xII60xI")

_REMEDY = "keep a copy of it, then restore a backup or choose another data folder with --data-dir"

TUNING = (
    "PRAGMA page_size = 8192",  # a page holds seven messages of 1 KiB; affects only a new file
    "PRAGMA locking_mode = EXCLUSIVE",  # no shared memory file, and no access by other programs
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # one fsync per commit: answered writes are on stable storage
    "PRAGMA wal_autocheckpoint = 2000",  # 16 MiB: a message deleted before a checkpoint is not copied to the file
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",  # 32 MiB
    "PRAGMA mmap_size = 0",  # a failing disk must cause an error, not a SIGBUS
    "PRAGMA temp_store = MEMORY",
    "PRAGMA secure_delete = OFF",  # Debian's default of ON writes every freed page once more
)


def open_connection(path: Path) -> sqlite3.Connection:
    """Open or create the store in the file ``path``. Raises: StartupError.

    Only the calling thread may use the returned connection.
    """
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        wanted = ".".join(map(str, SQLITE_VERSION_MIN))
        raise StartupError(f"popgate needs SQLite {wanted} or newer, not {sqlite3.sqlite_version}: upgrade the library")
    connection: sqlite3.Connection | None = None
    try:
        is_whole = _check_files(path)
        _forget_closed(path)
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        )  # not readable by other users; SQLite's log gets the same mode
        connection = sqlite3.connect(
            path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, cached_statements=STATEMENTS_CACHED_MAX
        )
        for pragma in TUNING:
            connection.execute(pragma).fetchall()
        _check_identity(connection, path)
        if not is_whole and path.stat().st_size <= QUICK_CHECK_BYTES_MAX:
            _quick_check(connection, path)
        # This write changes nothing, but it fails if the file or the disk is not writable.
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
        for statement in SCHEMA:  # executescript would commit first, but creation must be atomic
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
    """Record the checksum of the store's file. The file must already be closed.

    The checksum is valid until the file is opened again or is written to. A file of more than ``FILE_CHECK_BYTES_MAX``
    gets no checksum.

    Raises: OSError.
    """
    if path.stat().st_size <= FILE_CHECK_BYTES_MAX:
        write_stably(check_file(path), f"{path.stat().st_mtime_ns} {checksum(path)}")


def _forget_closed(path: Path) -> None:
    """Delete the recorded checksum of the store's file, because the file is about to be written to.

    The modification time of the file is not enough to detect a write. After a power cut, the file may have its former
    modification time although its content has changed, because SQLite syncs only the content.

    Raises: OSError.
    """
    check = check_file(path)
    if check.exists():
        check.unlink()
        sync_folder(path.parent)


def _check_files(path: Path) -> bool:
    """Check the store's file and its write-ahead log for damage.

    Return True if the recorded checksum proves that the file is unchanged since popgate closed it.

    Raises: StartupError if the file or the log is damaged.
    """
    log, check = path.with_name(path.name + "-wal"), check_file(path)
    damage = damage_in(log, bytes_max=LOG_CHECK_BYTES_MAX)
    if damage is not None:
        raise StartupError(f"{log} is damaged ({damage}): {_REMEDY}")
    if not path.exists() or not path.stat().st_size:
        if check.exists() or (log.exists() and log.stat().st_size):
            raise StartupError(f"{path} is missing or empty, although it was in use: {_REMEDY}")
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
    """Return the size in bytes that the file must have according to its header, or 0 if the header is outdated.

    SQLite itself does not notice if whole pages are missing at the end of the file.
    """
    with path.open("rb") as stream:
        header = stream.read(_FILE_HEADER.size)
    if len(header) < _FILE_HEADER.size:
        return 0
    page_size, changed, pages, valid_for = _FILE_HEADER.unpack(header)
    return pages * (page_size if page_size > 1 else 65_536) if changed == valid_for else 0


def _quick_check(connection: sqlite3.Connection, path: Path) -> None:
    """Check the structure of the file, but not its content, with SQLite's ``quick_check``.

    Raises: StartupError if the structure is damaged.
    """
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StartupError(f"{path} is damaged ({' '.join(found.split())}): {_REMEDY}")
