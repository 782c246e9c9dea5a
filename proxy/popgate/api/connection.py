"""Represents the connection of a client, for the handlers of its requests. Leases are undone if the client did not get
them.

Theory of operation. If a connection ends while a pop waits for messages, the pop ends, too: its ``Presence`` leaves.
The answer to a pop is *unproved* until a later request on the connection proves that the client has read the answer. If
the client ends the connection while an answer is unproved, this machine's kernel reports how many bytes the client's
kernel has acknowledged (TCP_INFO). If the last byte of the answer is not acknowledged, the answer's leases are undone.

If a program closes a socket that has unread bytes, the program's kernel sends RST instead of FIN. So the newest answer
counts as unread if an RST arrives within ``UNREAD_SECONDS`` after the answer was written, even if all bytes are
acknowledged. A later RST does not count, because machines between client and server reset idle connections while their
clients work. If the server closes the connection in an orderly way, no lease is undone: if the client did not read the
answer, its leases run until their deadlines. On other systems than Linux, and under TLS, only the bytes that are still
in this process count as not acknowledged.
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
"""Maximum number of unproved answers on one connection of a client that pipelines requests. If there are more, the
oldest answer counts as delivered."""
UNREAD_SECONDS = 1.0
"""Seconds after an answer was written within which an RST means that the client has not read the answer."""

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120xQ")
"""The layout of Linux' tcp_info up to tcpi_bytes_acked (since Linux 4.1)."""


class Connection:
    """One connection of a client.

    A handler sets ``presence`` while its request waits; the presence leaves when the connection ends. ``on_shutdown``
    is called when the server begins to stop. Only handlers whose requests would delay the stop set ``on_shutdown``.
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
        """One entry per unproved answer: the number of bytes that are written on the connection when the answer ends,
        the time when the answer was written, and the function that undoes the answer's leases."""

    # -- called by handlers ---------------------------------------------------------------------------------------

    def answering(self, undo: Callable[[], None]) -> None:
        """Record that the next answer contains leases. ``undo`` is called once if the answer is not delivered."""
        if self.gone:
            undo()
        else:
            self._undo = undo

    def writes(self, size: int) -> None:
        """Record that the head and the body of an answer are written next, directly after each other. The body has
        ``size`` bytes."""
        self.transport.is_corked = True
        if self._undo is not None:
            self._unproved.append((self.transport.written + size, time.monotonic(), self._undo))
            self._undo = None

    def was_written(self) -> None:
        """Record that the answer has been written. Send the head, which was held back, if no body followed (as for
        HEAD)."""
        self.transport.uncork()

    # -- called by the protocol -----------------------------------------------------------------------------------

    def unsent_bytes(self) -> int:
        """Return the number of written bytes that this process has not yet passed to the kernel."""
        return self.transport.inner.get_write_buffer_size()

    def request_began(self) -> None:
        """Record that the client has begun another request. If its kernel has acknowledged all earlier answers, they
        count as read. Otherwise the client pipelines requests, and the answers stay unproved."""
        if self._unproved and self._reached() >= self._unproved[-1][0]:
            self._unproved.clear()

    def ended(self, *, by_client: bool, abruptly: bool = False, is_cut: bool = False) -> None:
        """Record that the connection has ended, and undo the answers that were not delivered. Idempotent.

        ``by_client``: the client ended the connection. ``abruptly``: the connection ended by RST. ``is_cut``: the
        server ends the connection without sending the remaining bytes, so answers that are not completely sent are
        undone. If the server ended the connection in another way, no answer is undone.
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
        """Return the number of written bytes that the client's kernel has acknowledged. If this is unknown, return the
        number of bytes that were passed to this machine's kernel."""
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
