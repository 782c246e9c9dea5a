"""Defines the transport of a connection, which writes the head and the body of an answer together, and can end the
connection without losing the answer."""

import asyncio
from typing import Any

from popgate.runtime.tls_transport import TlsTransport

GOODBYE_SECONDS = 2.0
"""Seconds for which a connection stays open after a refusal, so that the client can read the reason."""
JOINED_BYTES_MAX = 64 * 1024
"""Maximum size in bytes of a body that is copied behind its head. Copying a larger body costs more than a second system
call."""


class JoinedWrites:
    """Wraps asyncio's transport ``inner``, and counts the written bytes.

    The head and the body of an answer are written with one system call instead of two.
    """

    __slots__ = ("_head", "_tls", "_written", "inner", "is_corked", "is_ending", "is_lossy", "is_receiving")

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self._tls = inner if isinstance(inner, TlsTransport) else None
        self._written = 0
        self.is_corked = False
        """Set to True before the head of an answer is written. The head is then held back until the body is written."""
        self.is_ending = False
        """Whether FIN was sent and incoming data is discarded."""
        self.is_receiving = False
        """Set to True while a request's body is incomplete. ``close`` then lets the client read the answer."""
        self.is_lossy = False
        """Whether something was written after the client had ended its side of a TLS connection. It was not sent."""
        self._head = b""

    @property
    def position(self) -> int:
        """Number of bytes that were written to the TCP connection, with those that the kernel has not taken yet."""
        return self._written if self._tls is None else self._tls.wire_bytes

    def write(self, data: bytes) -> None:
        self._written += len(data)
        if self._tls is not None and not self._tls.is_open:
            self.is_lossy = True
        if self.is_corked:
            self.is_corked = False
            self._head = data
            return
        if self._head:
            if len(data) <= JOINED_BYTES_MAX:
                data = self._head + data
            else:
                self.inner.write(self._head)
            self._head = b""
        self.inner.write(data)

    def uncork(self) -> None:
        """Write the head that was held back, if no body has followed it."""
        self.is_corked = False
        if self._head:
            head, self._head = self._head, b""
            self.inner.write(head)

    def close(self) -> None:
        """Close the connection after the written bytes. If a body is incomplete, do so as ``end``."""
        if self.is_receiving:
            self.end()
            return
        self.uncork()
        self.inner.close()

    def end(self) -> None:
        """Send FIN (under TLS, close_notify and FIN) after the written bytes, discard incoming data for
        ``GOODBYE_SECONDS``, and then close the connection.

        If the connection were closed immediately while it had unread bytes, the kernel would reset it, and the client
        might never receive the last bytes of the answer.
        """
        self.uncork()
        if self.is_closing():
            return
        self.is_ending = True
        try:
            self.inner.write_eof()
        except OSError:  # the client has reset the connection, which asyncio has not noticed yet
            self.inner.abort()
            return
        self.inner.resume_reading()
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._abort_when_read)

    def _abort_when_read(self) -> None:
        """Close the connection. If its client is still reading, wait: the limiter ends a connection whose client makes
        no progress."""
        if self.inner.get_write_buffer_size():
            asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._abort_when_read)
        else:
            self.inner.abort()

    def is_closing(self) -> bool:
        return self.is_ending or self.inner.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
