"""Configures the allocator of the C library, so that large blocks go back to the system when they are freed."""

import ctypes
import sys

LARGE_BYTES = 1 << 20
_MMAP_THRESHOLD = -3
"""glibc's parameter M_MMAP_THRESHOLD for mallopt."""


def give_back_large_blocks() -> None:
    """Let glibc take blocks from ``LARGE_BYTES`` on directly from the system. Without effect on other C libraries.

    By default, glibc raises this threshold to up to 32 MiB as soon as such blocks are freed. From then on, a small
    remnant can keep the memory of many large answers from being used again.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
