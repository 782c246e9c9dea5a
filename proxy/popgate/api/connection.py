"""Represents a client's connection to handlers. If the client has gone, messages that were leased for it are returned
at once.

Theory of operation. If a connection ends while a pop is parked, the pop ends: its ``Presence`` leaves. A pop's answer
is *unproved* until a later request on the connection proves that the client has read it. If the client ends the
connection before that, the kernel reports how many bytes the client's kernel has acknowledged (TCP_INFO). If the last
byte of an answer is not acknowledged, the answer's leases are undone.

If a program closes its socket with unread bytes, its kernel sends RST instead of FIN. So the newest answer counts as
unread if an RST arrives within ``UNREAD_SECONDS`` after it was written, even if its bytes are acknowledged. A later RST
does not count, because machines between client and server reset idle connections while their clients work. If the
server closes the connection in order, nothing is undone: the leases of a client that did not read run until their
deadlines. Without Linux, and under TLS, only the bytes that are still in this process count as not acknowledged.
"""

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable

from starlette.types import Send

from popgate.api.joined_writes import JoinedWrites
from popgate.engine.lease.pop_request import Presence

EXTENSION = "popgate.connection"
"""The key in ``scope["extensions"]`` under which a handler finds its ``Connection``."""
UNPROVED_MAX = 64
"""Maximum number of unproved answers of one pipelining client. Beyond it, the oldest answer counts as delivered."""
UNREAD_SECONDS = 1.0
"""Seconds after an answer within which an RST means that the client has not read the answer."""

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120xQ")
"""The layout of Linux' tcp_info up to tcpi_bytes_acked (since Linux 4.1)."""


class Connection:
    """One connection of a client.

    ``presence`` belongs to the pop that is being served. ``on_shutdown`` is called when the server begins to stop. Only
    requests that would delay the stop set it.
    """

    __slots__ = ("_acked_before", "_undo", "_unproved", "gone", "on_shutdown", "presence", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.gone = False
        self.presence: Presence | None = None
        self.on_shutdown: Callable[[], None] | None = None
        self.transport = JoinedWrites(transport)
        self._acked_before = self._bytes_acked() or 0
        self._undo: Callable[[], None] | None = None
        self._unproved: deque[tuple[int, float, Callable[[], None]]] = deque(maxlen=UNPROVED_MAX)
        """One entry per answer: the number of bytes written up to its end, the time, and the function that undoes
        it."""

    # -- called by handlers ---------------------------------------------------------------------------------------

    def answering(self, undo: Callable[[], None]) -> None:
        """Record that the next answer contains leases. ``undo`` is called once if the answer is not delivered."""
        if self.gone:
            undo()
        else:
            self._undo = undo

    def writes(self, size: int) -> None:
        """Record that an answer with a body of ``size`` bytes is written next. Its head and body follow each other
        directly."""
        self.transport.is_corked = True
        if self._undo is not None:
            self._unproved.append((self.transport.written + size, time.monotonic(), self._undo))
            self._undo = None

    def was_written(self) -> None:
        """Record that the answer has been written. If no body followed (as for HEAD), this sends the head, which was
        held back."""
        self.transport.uncork()

    # -- called by the protocol -----------------------------------------------------------------------------------

    def unsent_bytes(self) -> int:
        """Return the number of written bytes that are still in this process."""
        return self.transport.inner.get_write_buffer_size()

    def request_began(self) -> None:
        """Record another request. It proves that the client has read the earlier answers, unless the client
        pipelines."""
        if self._unproved and self._reached() >= self._unproved[-1][0]:
            self._unproved.clear()

    def ended(self, *, by_client: bool, abruptly: bool = False, is_cut: bool = False) -> None:
        """Undo the answers that were not delivered, if the client ended the connection. Idempotent.

        ``abruptly``: the connection ended by RST. ``is_cut``: the server ends the connection without sending the rest.
        Answers that are not completely sent are then undone.
        """
        if self.gone:
            return
        self.gone = True
        if self.presence is not None:
            self.presence.leave()
        if self._unproved and (by_client or is_cut):
            reached = self._reached() if by_client else self.transport.written - self.unsent_bytes()
            for end, written_at, undo in self._unproved:
                is_newest = end == self._unproved[-1][0]
                if end > reached or (is_newest and abruptly and time.monotonic() - written_at < UNREAD_SECONDS):
                    undo()
        self._unproved.clear()

    def _reached(self) -> int:
        """Return the number of written bytes that the client's kernel has acknowledged, as far as this is known."""
        acked = self._bytes_acked()
        if acked is None:
            return self.transport.written - self.unsent_bytes()
        return acked - self._acked_before

    def _bytes_acked(self) -> int | None:
        sock = self.transport.inner.get_extra_info("socket")
        if _TCP_INFO is None or sock is None or self.transport.inner.get_extra_info("sslcontext") is not None:
            return None
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
        except OSError:
            return None
        return _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else None


async def send_answer(
    send: Send, connection: Connection | None, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> None:
    """Send a whole answer."""
    if connection is not None:
        connection.writes(len(body))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    if connection is not None:
        connection.was_written()
