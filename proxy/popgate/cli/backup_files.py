"""Writes the folder of a backup: from an archive, or from the data folder of a stopped proxy."""

import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, cast

from popgate import __version__
from popgate.adapters.sqlite.folder_lock import unused
from popgate.adapters.sqlite.restoring import fold_log, schema_of
from popgate.backup.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    NAMES,
    STORE_FILE,
    BackedUpFile,
    Manifest,
    ManifestError,
    decoded,
)
from popgate.cli.endings import CommandFailed
from popgate.cli.progress import Progress
from popgate.domain.errors import StartupError
from popgate.runtime.data_folder import bound_broker
from popgate.runtime.stable_files import sync_folder

PART_BYTES = 1024 * 1024


class Readable(Protocol):
    """What ``tarfile`` needs to read an archive from its beginning to its end."""

    def read(self, size: int, /) -> bytes: ...


class BackupDraft:
    """A backup that is being written, in a hidden folder beside ``folder``. ``finish`` gives the folder its name.

    At the end of the context, the draft is deleted unless it is finished. Raises: CommandFailed.
    """

    def __init__(self, folder: Path) -> None:
        self._target = folder.absolute()
        self.folder = self._target.with_name(f".{self._target.name}.partial-{secrets.token_hex(4)}")

    def __enter__(self) -> Self:
        try:
            if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
                raise CommandFailed(f"{self._target} exists and is not an empty folder: name a new one")
            self.folder.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise CommandFailed(f"{self._target} can't be written ({error.strerror}): name another folder") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CommandFailed(f"the backup can't be written: {error.strerror or error}") from error

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, write everything to the disk, and give the folder its name."""
        draft = self.folder / MANIFEST_FILE
        with _created(draft) as stream:
            stream.write(manifest.encoded())
            _sync(stream)
        sync_folder(self.folder)
        try:
            self.folder.rename(self._target)
        except OSError as error:
            reason = error.strerror or error
            raise CommandFailed(f"{self._target} can't be replaced ({reason}): name a folder inside of it") from error
        sync_folder(self._target.parent)


def read_archive(stream: Readable, folder: Path, progress: Progress) -> Manifest:
    """Write the files of an archive to ``folder``, and return the manifest at its end. Raises: CommandFailed if the
    archive is incomplete or damaged, OSError if a file can't be written."""
    written: dict[str, BackedUpFile] = {}
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:  # it only reads
            for entry in archive:
                content = archive.extractfile(entry)
                if content is None or entry.name not in (*NAMES, MANIFEST_FILE) or entry.name in written:
                    raise CommandFailed(f"the backup contains {entry.name!r}, which popgate does not know")
                if entry.name == MANIFEST_FILE:
                    manifest = decoded(content.read(MANIFEST_BYTES_MAX))
                    check_files(written, manifest)
                    return manifest
                written[entry.name] = write_file(content, folder / entry.name, progress, entry.size)
    except (tarfile.TarError, EOFError) as error:
        raise CommandFailed(f"the backup is cut off or damaged ({error})") from error
    except ManifestError as error:
        raise CommandFailed(f"the manifest of the backup is not valid: {error}") from error
    raise CommandFailed("the backup is cut off: it has no manifest")


def check_files(found: Mapping[str, BackedUpFile], manifest: Manifest) -> None:
    """Raises: CommandFailed if the files differ from the manifest."""
    for one in manifest.files:
        there = found.get(one.name)
        if there is None:
            raise CommandFailed(f"the backup is incomplete: it has no {one.name}")
        if there != one:
            raise CommandFailed(f"the backup is damaged: {one.name} differs from the manifest; use another backup")


def write_file(content: IO[bytes], file: Path, progress: Progress, size: int) -> BackedUpFile:
    """Copy ``content`` to a new private file, write it to the disk, and return its description. Raises: OSError."""
    digest, done = sha256(), 0
    with _created(file) as stream:
        while part := content.read(PART_BYTES):
            digest.update(part)
            stream.write(part)
            done += len(part)
            progress.say(f"writing {file.name}: {done >> 20:,} of {size >> 20:,} MiB")
        _sync(stream)
    return BackedUpFile(name=file.name, bytes=done, sha256=digest.hexdigest())


def copy_stopped_folder(data_folder: Path, folder: Path, progress: Progress) -> Manifest:
    """Copy the data folder of a stopped proxy, and return the manifest. The data folder does not change.

    Raises: CommandFailed, also if a proxy uses it.
    """
    started_at = time.time()
    try:
        with unused(data_folder):
            broker = bound_broker(data_folder)
            if broker is None or not (data_folder / STORE_FILE).exists():
                raise CommandFailed(f"{data_folder} is not the data folder of a proxy with a store")
            for name in (*sorted(NAMES), f"{STORE_FILE}-wal"):
                with suppress(FileNotFoundError), (data_folder / name).open("rb") as source:
                    write_file(source, folder / name, progress, (data_folder / name).stat().st_size)
            fold_log(folder / STORE_FILE)
    except StartupError as error:
        running = "for a running proxy, leave --data-dir out, and name it with --url"
        raise CommandFailed(
            f"{error.detail} ({running})" if "uses the data folder" in error.detail else error.detail
        ) from error
    except FileNotFoundError as error:
        raise CommandFailed(f"{data_folder} is not a data folder: no proxy has used it") from error
    (folder / f"{STORE_FILE}-wal").unlink(missing_ok=True)
    return Manifest(
        popgate=__version__,
        schema=schema_of(folder / STORE_FILE),
        broker=broker,
        started_at=started_at,
        taken_at=time.time(),
        files=[described(folder / name) for name in sorted(NAMES) if (folder / name).exists()],
    )


def described(file: Path) -> BackedUpFile:
    """Read a file, and return its description. Raises: OSError."""
    digest, size = sha256(), 0
    with file.open("rb") as stream:
        while part := stream.read(PART_BYTES):
            digest.update(part)
            size += len(part)
    return BackedUpFile(name=file.name, bytes=size, sha256=digest.hexdigest())


def _created(file: Path) -> IO[bytes]:
    """Return a new private file, opened to be written. Raises: OSError."""
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
