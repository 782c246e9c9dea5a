"""Asks the kernel how many bytes of a TCP connection the other side's kernel has acknowledged."""

import socket
import struct
from typing import Any

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120xQ")
"""The layout of Linux' tcp_info up to tcpi_bytes_acked (since Linux 4.1)."""


def acknowledged_bytes(sock: Any) -> int | None:
    """Return the number of acknowledged bytes since the connection began, or None if it is unknown.

    It may be 1 before the first byte. ``sock`` is what a transport of asyncio calls its socket, or None.
    """
    if _TCP_INFO is None or sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
    except OSError:
        return None
    if len(info) != _BYTES_ACKED.size:  # an older kernel
        return None
    acknowledged: int = _BYTES_ACKED.unpack(info)[0]
    return acknowledged
