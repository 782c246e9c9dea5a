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
answer, its leases run until their deadlines. On other systems than Linux, only the bytes that are still in this process
count as not acknowledged. Under TLS, positions are counted in encrypted bytes.
"""

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from popgate.api.joined_writes import JoinedWrites
from popgate.api.usage import Usage
from popgate.engine.lease.pop_request import Presence
from popgate.runtime.tcp_info import acknowledged_bytes
from popgate.runtime.tls_transport import TlsTransport
from popgate.wire.admission import INSTANCE_PREFIX

EXTENSION = "popgate.connection"
"""The key in ``scope["extensions"]`` under which a handler finds its ``Connection``."""
UNPROVED_MAX = 64
"""Maximum number of unproved answers on one connection of a client that pipelines requests. If there are more, the
oldest answer counts as delivered."""
UNREAD_SECONDS = 1.0
"""Seconds after an answer was written within which an RST means that the client has not read the answer."""


class PeerCertificate(NamedTuple):
    """A verified client certificate: its subject alternative names, and when it expires (Unix seconds).

    The form of a name tells its kind: a URI contains ``://`` or names an instance of popgate, a mail address contains
    ``@``, and any other name is a DNS name. Names whose form does not fit their kind are left out, so that a name of
    one kind can't be used as one of another kind.
    """

    names: tuple[str, ...]
    expires_at: float


class _Unproved:
    """An answer with leases that is not proved to have arrived. ``end`` is its position (see ``JoinedWrites``), and is
    infinite until it is written. ``undo`` undoes the leases."""

    __slots__ = ("end", "undo", "written_at")

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo
        self.end: float = math.inf
        self.written_at = time.monotonic()


class Connection:
    """One connection of a client.

    A handler sets ``presence`` while its request waits; the presence leaves when the connection ends. ``on_shutdown``
    is called when the server begins to stop. Only handlers whose requests would delay the stop set ``on_shutdown``.
    """

    __slots__ = (
        "_acked_before",
        "_undo",
        "_unproved",
        "certificate",
        "gone",
        "on_shutdown",
        "presence",
        "transport",
        "user",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self.gone = False
        self.presence: Presence | None = None
        self.on_shutdown: Callable[[], None] | None = None
        self.certificate = certificate_of(transport) if isinstance(transport, TlsTransport) else None
        """The verified certificate of the client, if it has presented one."""
        self.user: Usage | None = None
        """The usage of the principal that sends requests on this connection."""
        self.transport = JoinedWrites(transport)
        self._acked_before = (
            transport.acknowledged_before if isinstance(transport, TlsTransport) else self._bytes_acked() or 0
        )
        self._undo: Callable[[], None] | None = None
        self._unproved: list[_Unproved] = []

    # -- called by handlers ---------------------------------------------------------------------------------------

    def answering(self, undo: Callable[[], None]) -> None:
        """Record that the next answer contains leases. ``undo`` is called once if the answer is not delivered."""
        if self.gone:
            undo()
        else:
            self._undo = undo

    def writes(self) -> None:
        """Record that an answer is written next."""
        if self._undo is not None:
            self._unproved.append(_Unproved(self._undo))
            del self._unproved[:-UNPROVED_MAX]
            self._undo = None

    def was_written(self) -> None:
        """Record that the answer has been written. Send the head, which was held back, if no body followed (as for
        HEAD)."""
        self.transport.uncork()
        if self._unproved and self._unproved[-1].end == math.inf and not self.transport.is_lossy:
            self._unproved[-1].end = self.transport.position

    # -- called by the protocol -----------------------------------------------------------------------------------

    def unsent_bytes(self) -> int:
        """Return the number of written bytes that this process has not yet passed to the kernel."""
        return self.transport.inner.get_write_buffer_size()

    def request_began(self) -> None:
        """Record that the client has begun another request. If its kernel has acknowledged all earlier answers, they
        count as read. Otherwise the client pipelines requests, and the answers stay unproved."""
        if self._unproved and self.reached() >= self._unproved[-1].end:
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
        if self.user is not None:
            self.user.connections -= 1
        if self.presence is not None:
            self.presence.leave()
        if self._unproved and (by_client or is_cut):
            reached = self.reached() if by_client else self.transport.position - self.unsent_bytes()
            newest = self._unproved[-1]
            is_unread = abruptly and time.monotonic() - newest.written_at < UNREAD_SECONDS
            for answer in self._unproved:
                if answer.end > reached or (answer is newest and is_unread):
                    answer.undo()
        self._unproved.clear()

    def reached(self) -> int:
        """Return the position up to which the client's kernel has acknowledged the written bytes. If this is unknown,
        return the position up to which they were passed to this machine's kernel."""
        acked = self._bytes_acked()
        if acked is None:
            return self.transport.position - self.unsent_bytes()
        return acked - self._acked_before

    def _bytes_acked(self) -> int | None:
        return acknowledged_bytes(self.transport.inner.get_extra_info("socket"))


def certificate_of(transport: TlsTransport) -> PeerCertificate | None:
    """Return the verified certificate of the other side, or None if it has presented none."""
    try:
        found = transport.ssl_object.getpeercert()
    except ValueError:  # a name of the certificate is not valid text, so it names no principal
        return None
    if not found:
        return None
    names = cast("Sequence[tuple[str, Any]]", found.get("subjectAltName", ()))
    return PeerCertificate(
        tuple(name for kind, name in names if _fits(kind, name)),
        float(ssl.cert_time_to_seconds(cast("str", found["notAfter"]))),
    )


def _fits(kind: str, name: Any) -> bool:
    """Return whether a name has the form of its kind (see ``PeerCertificate``). Names of other kinds don't count, such
    as a directory name, which is no text. Names beyond ASCII don't count, because different ones may become the same in
    lower case."""
    if not isinstance(name, str) or not name.isascii():
        return False
    is_uri = "://" in name or name.startswith(INSTANCE_PREFIX)
    if kind == "URI":
        return is_uri
    if kind == "email":
        return "@" in name and not is_uri
    return kind == "DNS" and "@" not in name and not is_uri
