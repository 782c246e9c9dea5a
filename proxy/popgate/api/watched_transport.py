"""The transport of a watched connection: it knows how many of the written bytes the peer has acknowledged.

It wraps asyncio's socket transport, and knows bytes, but nothing of HTTP or leases.
"""

import asyncio
import socket
import struct
from asyncio.trsock import TransportSocket
from collections.abc import Callable
from typing import Any

try:
    from fcntl import ioctl
except ImportError:  # no Unix
    ioctl = None  # type: ignore[assignment]

LINGER_SECONDS_MAX = 30.0
GOODBYE_SECONDS = 2.0
"""Seconds that the peer of a refused request may take to read the reason."""
JOINED_BYTES_MAX = 64 * 1024
"""Size in bytes above which copying the body costs more than a second system call."""

_SIOCOUTQ = 0x5411
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120xQ")
"""Linux' tcp_info up to tcpi_bytes_acked (4.1 and newer)."""


class WatchedTransport(asyncio.Transport):
    """Counts written bytes, joins an answer's head and body, and waits for the peer before it closes after an
    unproved answer."""

    __slots__ = (
        "_acked_before",
        "_eof",
        "_head",
        "_inner",
        "_is_held",
        "_own_close",
        "_socket",
        "backed_up",
        "corked",
        "linger",
        "may_linger",
        "written",
    )

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._own_close = False
        self._eof = False
        sock = inner.get_extra_info("socket")
        watched = isinstance(sock, TransportSocket) and inner.get_extra_info("sslcontext") is None
        self._socket: TransportSocket | None = sock if watched else None
        self._acked_before = self._kernel_acknowledged() or 0
        self._head = b""
        self.corked = False
        """Set before the head of an answer is written: the head waits for the body, and both cost one system call."""
        self.written = 0
        self.backed_up = False
        """Whether some written bytes have not been handed to the kernel yet."""
        self.linger = False
        """Set while an answer is unproved: ``close`` then waits for the peer instead of closing at once."""
        self.may_linger = True
        self._is_held = False
        # So that pause_writing and resume_writing say exactly when the buffer is not empty.
        inner.set_write_buffer_limits(high=0)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)
        if self.corked:
            self.corked = False
            self._head = bytes(data)
            return
        if self._head:
            if len(data) <= JOINED_BYTES_MAX:
                data = self._head + data
            else:
                self._inner.write(self._head)
            self._head = b""
        self._inner.write(data)

    def uncork(self) -> None:
        """Write the head if it was held back, which is rare."""
        self.corked = False
        if self._head:
            head, self._head = self._head, b""
            self._inner.write(head)

    def close(self) -> None:
        """Close the connection; after an unproved answer, send FIN and wait for the peer for a limited time."""
        self.uncork()
        if not self.linger or not self.may_linger or self._eof or self._inner.is_closing():
            self._own_close = self._own_close or not self._inner.is_closing()
            self._inner.close()
            return
        self._say_goodbye(LINGER_SECONDS_MAX, self._inner.close)

    def end(self) -> None:
        """Send FIN after the written bytes, and discard incoming data for a moment.

        Closing with unread bytes would reset the connection, and the peer might never see the last bytes.
        """
        self.uncork()
        if not self._eof and not self._inner.is_closing():
            self._say_goodbye(GOODBYE_SECONDS, self._inner.abort)

    def _say_goodbye(self, seconds: float, end: Callable[[], None]) -> None:
        self._own_close = self._eof = True
        try:
            self._inner.write_eof()
        except OSError:  # the peer has reset the connection, which asyncio has not noticed yet
            self._inner.abort()
            return
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(seconds, end)

    @property
    def lingering(self) -> bool:
        return self._eof

    def broken(self) -> bool:
        """Return whether a write has failed, so that the last bytes were not handed to the kernel."""
        return self._inner.is_closing() and not self._own_close

    def unsent(self) -> int:
        """Return the number of written bytes that are still in this process."""
        return len(self._head) + self._inner.get_write_buffer_size()

    def unacknowledged(self) -> int:
        """Return the number of written bytes that the peer has not acknowledged, as far as it is known."""
        waiting = self.unsent()
        if self._socket is None or ioctl is None:
            return waiting
        try:
            in_kernel: int = struct.unpack("i", ioctl(self._socket.fileno(), _SIOCOUTQ, b"\0\0\0\0"))[0]
        except OSError:
            return waiting
        return waiting + max(0, in_kernel - self._eof)  # a FIN counts as a byte

    def acknowledged(self) -> int:
        """Return the number of written bytes that the peer has acknowledged, as far as it is known."""
        acked = self._kernel_acknowledged()
        if acked is not None:
            return min(self.written, acked - self._acked_before)  # a FIN counts as a byte
        # An error has emptied the buffer: how much waited there is not known.
        return self.written - max(self.unacknowledged(), self.backed_up)

    def _kernel_acknowledged(self) -> int | None:
        if self._socket is None or _TCP_INFO is None:
            return None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
        except OSError:
            return None
        acked: int | None = _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else None
        return acked

    def is_closing(self) -> bool:
        return self._eof or self._inner.is_closing()

    # -- handed through -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._inner.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            self._inner.resume_reading()

    def hold(self) -> None:
        """Stop reading until ``let_go``, even if reading is resumed."""
        self._is_held = True
        self._inner.pause_reading()

    def let_go(self, *, reads: bool) -> None:
        """End ``hold``: read again now, or when reading is resumed."""
        self._is_held = False
        if reads:
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()
