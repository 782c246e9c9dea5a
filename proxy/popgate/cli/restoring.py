"""Restores a backup into a data folder. A proxy refuses to start on a folder whose restore has not ended.

empty folder --mark it--> restoring --copy and check every file, raise the numbers--> whole --remove the mark--> done
"""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from popgate.adapters.sqlite.folder_lock import LOCK_FILE, FolderLock, unused
from popgate.adapters.sqlite.restoring import check_store, raise_numbers
from popgate.backup.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    STORE_FILE,
    BackedUpFile,
    Manifest,
    ManifestError,
    decoded,
)
from popgate.cli.backup_files import check_files, described, read_archive, write_file
from popgate.cli.endings import CommandFailed
from popgate.cli.progress import Progress
from popgate.domain.errors import StartupError
from popgate.runtime.restoring import RESTORING_FILE
from popgate.runtime.stable_files import (
    check_file,
    checksum,
    draft_of,
    make_stable_folder,
    sync_folder,
    write_stably,
)

_OF_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names in a folder that count as nothing."""
_CHECKED_FILES = ("secret", "broker")


def checked_manifest(backup: Path, progress: Progress) -> Manifest:
    """Check every byte of a backup, and return its manifest. Raises: CommandFailed."""
    with _store_errors():
        if backup.is_file():
            with tempfile.TemporaryDirectory(prefix="popgate-check-") as folder, backup.open("rb") as archive:
                manifest = read_archive(archive, Path(folder), progress)
                check_store(Path(folder) / STORE_FILE)
                return manifest
        manifest = _manifest_in(backup)
        check_files({one.name: described(backup / one.name) for one in manifest.files}, manifest)
        check_store(backup / STORE_FILE)
        return manifest


def restore(backup: Path, folder: Path, progress: Progress) -> Manifest:
    """Restore a backup into the data folder ``folder``, which must be missing or empty, or must have an interrupted
    restore. Raises: CommandFailed, StartupError."""
    is_archive = backup.is_file()
    manifest = None if is_archive else _manifest_in(backup)
    _check_empty(folder)
    with _store_errors():
        make_stable_folder(folder)
        lock = FolderLock(folder)
        try:
            write_stably(folder / RESTORING_FILE, f"{backup.absolute()}\n")
            for left in folder.iterdir():
                if left.name not in (LOCK_FILE, RESTORING_FILE, *_OF_FILE_SYSTEMS):
                    left.unlink()  # of an interrupted restore
            if manifest is None:
                with backup.open("rb") as archive:
                    manifest = read_archive(archive, folder, progress)
            else:
                _copy(backup, folder, manifest, progress)
            _finish(folder)
        finally:
            lock.release()
    return manifest


def _copy(backup: Path, folder: Path, manifest: Manifest, progress: Progress) -> None:
    found: dict[str, BackedUpFile] = {}
    for one in manifest.files:
        with (backup / one.name).open("rb") as source:
            found[one.name] = write_file(source, folder / one.name, progress, one.bytes)
    check_files(found, manifest)


def _finish(folder: Path) -> None:
    """Check the restored store, prepare it, and remove the mark. Raises: StartupError, OSError."""
    check_store(folder / STORE_FILE)
    raise_numbers(folder / STORE_FILE)
    for name in _CHECKED_FILES:
        if (folder / name).exists():
            write_stably(check_file(folder / name), checksum(folder / name))
    owner = folder.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        for file in folder.iterdir():
            os.chown(file, owner.st_uid, owner.st_gid, follow_symlinks=False)
    sync_folder(folder)
    (folder / RESTORING_FILE).unlink()
    sync_folder(folder)


def _check_empty(folder: Path) -> None:
    """Raises: CommandFailed, or StartupError if a proxy uses the folder."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CommandFailed(f"{folder} is not a folder: name another one with --data-dir")
    names = {one.name for one in folder.iterdir()} - _OF_FILE_SYSTEMS
    if LOCK_FILE in names:
        with unused(folder):
            pass
    if RESTORING_FILE in names or not names - {LOCK_FILE, draft_of(folder / RESTORING_FILE).name}:
        return
    raise CommandFailed(
        f"{folder} is not empty, and a restore never overwrites a file: name a new folder with --data-dir, or move "
        "this one away first"
    )


def _manifest_in(backup: Path) -> Manifest:
    """Return the manifest of a backup in a folder. Raises: CommandFailed."""
    file = backup / MANIFEST_FILE
    try:
        with file.open("rb") as stream:
            return decoded(stream.read(MANIFEST_BYTES_MAX))
    except FileNotFoundError as error:
        raise CommandFailed(f"{backup} is not a whole backup: it has no {MANIFEST_FILE}") from error
    except OSError as error:
        raise CommandFailed(f"{file} can't be read ({error.strerror})") from error
    except ManifestError as error:
        raise CommandFailed(f"{file} is not valid: {error}") from error


@contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except StartupError as error:
        raise CommandFailed(error.detail) from error
    except FileNotFoundError as error:
        raise CommandFailed(f"the backup is incomplete: {error.filename} is missing") from error
    except OSError as error:
        raise CommandFailed(f"the backup can't be read or restored: {error.strerror or error}") from error
