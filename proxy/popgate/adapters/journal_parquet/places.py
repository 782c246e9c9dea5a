"""Implements places for the journal's files: a local folder, or a URL that pyarrow or fsspec supports.

Readers see each file either completely or not at all. In a folder, a file is first written below ``WRITING``, which
readers ignore. Then it is synced to stable storage and renamed. An object store shows an object only after the upload
is complete. All methods of a place block.
"""

import contextlib
import os
import re
import time
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from popgate.adapters.journal_parquet.arrow import FileSystem, filesystems, fsspec_core, pyarrow

WRITING = "_writing"
"""The folder for unfinished files. One listing of this folder finds all files that killed proxies have left behind."""
LEFT_OVER_SECONDS = 3_600.0
"""Age in seconds at which an unfinished file is deleted. No proxy takes so long to write one file, so the proxy that
wrote the file has ended."""
_DRAFT = re.compile(r"probe-\d+$|.+\.parquet$")
"""The names of unfinished files. Other files are not deleted."""
OBJECT_STORES = frozenset({"s3", "gcs", "abfs", "memory"})
"""Names of the filesystem types that show only complete objects and don't support an atomic rename."""


class Place(Protocol):
    """A place where files of the journal are written. ``name`` is shown to operators, and contains no credentials."""

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Create the place, check that it is writable, and delete unfinished files that killed proxies left behind.

        Raises: OSError.
        """
        ...

    def put(self, path: str, content: memoryview) -> None:
        """Write a complete file to stable storage. If the file exists, it is replaced.

        Raises: OSError. The caller must then repeat the call.
        """
        ...


class UnusablePlace(Exception):
    """A URL is not supported, or its filesystem can't be used. The message contains the reason."""


def place_at(target: str) -> Place:
    """Return the place at a path or a URL, without opening it. Raises: UnusablePlace."""
    if "://" not in target:
        return LocalFolder(Path(target))
    parts = urlsplit(target)
    if parts.scheme == "file":
        return LocalFolder(Path(unquote(parts.path)))
    try:
        filesystem, root = _reached(target)
    except (ImportError, ValueError, OSError, pyarrow.ArrowException) as error:
        raise UnusablePlace(first_line(error).replace(target, shown(target)).partition("?")[0]) from error
    return RemoteFolder(filesystem, root, shown(target))


def filesystem_at(target: str) -> tuple[FileSystem, str]:
    """Return pyarrow's filesystem of a path or a URL, and the path in this filesystem, for readers.

    Raises: the errors of pyarrow and of fsspec.
    """
    if "://" not in target:
        return filesystems.LocalFileSystem(), str(Path(target).absolute())
    return _reached(target)


def shown(target: str) -> str:
    """Return a path or a URL for operators. The credentials, query and fragment of a URL are removed."""
    if "://" not in target:
        return target
    scheme, _, place = target.partition("://")
    return f"{scheme}://{re.split('[?#]', place.rpartition('@')[2])[0]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its reason if it is an OSError."""
    told = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return (told.splitlines() or [type(error).__name__])[0]


def _reached(url: str) -> tuple[FileSystem, str]:
    """Return the filesystem of ``url``, and the path in this filesystem.

    If pyarrow does not support the filesystem type, fsspec is used, which supports more types.
    """
    try:
        filesystem, root = filesystems.FileSystem.from_uri(url)
    except pyarrow.ArrowInvalid as error:
        if "Unrecognized filesystem type" not in str(error):
            raise
        found, root = fsspec_core.url_to_fs(url)
        filesystem = filesystems.PyFileSystem(filesystems.FSSpecHandler(found))
    return filesystem, str(root)


class LocalFolder:
    """A place in a mounted folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = folder / WRITING
        self._synced: set[Path] = set()
        """Folders that are known to exist on stable storage."""

    @property
    def name(self) -> str:
        return str(self._folder)

    def open(self) -> None:
        """Open the place, as ``Place.open`` describes."""
        before = time.time() - LEFT_OVER_SECONDS
        with self._drafts() as drafts:
            with os.scandir(drafts) as found:
                lefts = [left for left in found if _DRAFT.match(left.name) and left.is_file(follow_symlinks=False)]
            for left in lefts:
                with contextlib.suppress(FileNotFoundError):  # another proxy that is starting has removed it
                    if os.stat(left.name, dir_fd=drafts, follow_symlinks=False).st_mtime < before:
                        os.unlink(left.name, dir_fd=drafts)
            probe = f"probe-{os.getpid()}"
            os.close(_new_file(probe, drafts))
            os.unlink(probe, dir_fd=drafts)

    def put(self, path: str, content: memoryview) -> None:
        """Write a file, as ``Place.put`` describes."""
        target = self._folder / path
        self._make(target.parent)
        with self._drafts() as drafts:
            try:
                with os.fdopen(_new_file(target.name, drafts), "wb", buffering=0) as stream:
                    while content:
                        content = content[stream.write(content) :]
                    os.fsync(stream.fileno())
                os.replace(target.name, target, src_dir_fd=drafts)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(target.name, dir_fd=drafts)
                raise
        _sync(target.parent)

    @contextlib.contextmanager
    def _drafts(self) -> Generator[int]:
        """Open the folder for unfinished files, which is no link: another program may have written one there."""
        self._make(self._writing)
        drafts = os.open(self._writing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield drafts
        finally:
            os.close(drafts)

    def _make(self, folder: Path) -> None:
        """Create the folder and its parents on stable storage."""
        if folder in self._synced and folder.is_dir():
            return
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for one in missing:
            _sync(one.parent)
        self._synced = {folder, self._writing}  # only the latest hour's folder is needed again


class RemoteFolder:
    """A folder below ``root`` of one of pyarrow's filesystems."""

    def __init__(self, filesystem: FileSystem, root: str, name: str) -> None:
        self._filesystem = filesystem
        self._root = PurePosixPath(root)
        self._shows_whole_files = _type_of(filesystem) in OBJECT_STORES
        self.name = name

    def open(self) -> None:
        """Open the place, as ``Place.open`` describes."""
        writing = str(self._root / WRITING)
        probe = f"{writing}/probe-{os.getpid()}"
        with _as_os_errors():
            self._filesystem.create_dir(writing, recursive=True)
            self._write(probe, memoryview(b"-"))
            self._filesystem.delete_file(probe)
            before = time.time() - LEFT_OVER_SECONDS
            for left in self._filesystem.get_file_info(filesystems.FileSelector(writing, allow_not_found=True)):
                if (
                    left.is_file
                    and _DRAFT.match(left.base_name)
                    and left.mtime is not None
                    and left.mtime.timestamp() < before
                ):
                    self._filesystem.delete_file(left.path)

    def put(self, path: str, content: memoryview) -> None:
        """Write a file, as ``Place.put`` describes."""
        target = self._root / path
        with _as_os_errors():
            if self._shows_whole_files:
                self._write(str(target), content)
                return
            draft = str(self._root / WRITING / target.name)
            self._filesystem.create_dir(str(target.parent), recursive=True)
            self._write(draft, content)
            self._filesystem.move(draft, str(target))

    def _write(self, path: str, content: memoryview) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(content)


def _type_of(filesystem: FileSystem) -> str:
    name = str(filesystem.type_name)
    return name.removeprefix("py::fsspec+").partition("(")[0].strip("'\" ,)")


@contextlib.contextmanager
def _as_os_errors() -> Generator[None]:
    """Convert every error of an external filesystem to an OSError, so that no error ends the journal."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {first_line(error)}") from error


def _new_file(name: str, folder: int) -> int:
    """Create a file in the open folder, in place of another one or a link, and return it open for writing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_conforms: tuple[type[Place], type[Place]] = (LocalFolder, RemoteFolder)
