"""Writes a backup as a tar archive, part by part. The manifest is the last file, so an archive that was cut off has
none."""

import tarfile
from collections.abc import Generator
from hashlib import sha256
from io import BytesIO
from typing import BinaryIO

from popgate.backup.manifest import MANIFEST_FILE, BackedUpFile

CONTENT_TYPE = "application/x-tar"
PART_BYTES = 1024 * 1024
_FILE_MODE = 0o600


def file_parts(name: str, content: BinaryIO, size: int, changed_at: float) -> Generator[bytes, None, BackedUpFile]:
    """Yield the parts of the archive for one file of ``size`` bytes. Return its description for the manifest.

    Raises: OSError, also if the file has fewer bytes.
    """
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, _FILE_MODE, round(changed_at)
    yield entry.tobuf(tarfile.PAX_FORMAT)
    digest, left = sha256(), size
    while left:
        part = content.read(min(PART_BYTES, left))
        if not part:
            raise OSError(f"{name} is shorter than {size} bytes")
        digest.update(part)
        left -= len(part)
        yield part
    yield bytes(-size % tarfile.BLOCKSIZE)
    return BackedUpFile(name=name, bytes=size, sha256=digest.hexdigest())


def end_parts(manifest: bytes, changed_at: float) -> Generator[bytes, None, None]:
    """Yield the parts of the archive for its manifest, and its end."""
    yield from file_parts(MANIFEST_FILE, BytesIO(manifest), len(manifest), changed_at)
    yield bytes(2 * tarfile.BLOCKSIZE)
