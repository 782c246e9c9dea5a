"""Passes certificates and keys in memory to ``ssl``, which loads them from files only."""

import contextlib
import os
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def readable_by_ssl(content: bytes) -> Generator[str]:
    """Yield the path of a file with ``content`` that only this user can read. On Linux, the file is in memory, so that
    a read-only file system does no harm."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("popgate", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name
