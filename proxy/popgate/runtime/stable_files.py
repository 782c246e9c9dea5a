"""Writes files and folders to stable storage.

A new file or folder survives a power cut only after its parent folder is synced.
"""

import os
from pathlib import Path
from zlib import crc32

CHECK_SUFFIX = ".check"
"""Suffix of a checksum file. It is in the same folder as the file whose checksum it contains."""
_CHUNK_BYTES = 1024 * 1024


def make_stable_folder(folder: Path, *, mode: int = 0o700) -> None:
    """Create ``folder`` and its missing parents, and sync the parent folder of each. Raises: OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=mode, exist_ok=True)
        sync_folder(one.parent)
    folder.mkdir(mode=mode, exist_ok=True)  # raises an error if the path is not a folder


def write_stably(file: Path, text: str) -> None:
    """Write ``file`` atomically, readable by its owner only. A link in its place is replaced. Raises: OSError."""
    draft = draft_of(file)
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
    sync_folder(file.parent)


def draft_of(file: Path) -> Path:
    """Return where ``write_stably`` writes a file until it gives it its name. A kill can leave it there."""
    return file.with_name(f"{file.name}.new")


def sync_folder(folder: Path) -> None:
    """Write the directory entries of ``folder`` to stable storage (fsync). Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(file: Path) -> str:
    """Return the checksum (CRC-32, hexadecimal) of the content of ``file``. Raises: OSError."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            total = crc32(chunk, total)
    return f"{total:08x}"


def check_file(file: Path) -> Path:
    """Return the path of the file that contains the checksum of ``file``."""
    return file.with_name(file.name + CHECK_SUFFIX)
