"""Accepts TLS on one connection. A handshake counts as a connection of the limiter, and is limited like one."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from popgate.api.connection_limiter import Body, ConnectionLimiter, LimitedConnection
from popgate.api.joined_writes import GOODBYE_SECONDS, JoinedWrites
from popgate.api.problems import HttpError, problem_answer
from popgate.api.protocol import WatchedProtocol
from popgate.domain.errors import PopgateError
from popgate.runtime.tls_transport import TlsTransport

FIRST_BYTES_OF_HTTP = frozenset(range(ord("A"), ord("Z") + 1))
"""Bytes with which a request over plain HTTP begins. A record of TLS begins with none of them."""


class Handshake(asyncio.Protocol):
    """The TLS handshake of a client. After it, the protocol that ``served`` returns takes over.

    The limiter ends the handshake like a request whose head does not arrive. If there is no room, the handshake may
    take ``GOODBYE_SECONDS``, so that the client can read the refusal. Plain HTTP is answered with 400. ``failed`` is
    called with the reason and the client's address if the client was not authenticated, or broke the protocol.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        limiter: ConnectionLimiter,
        served: Callable[[LimitedConnection], WatchedProtocol],
        failed: Callable[[ssl.SSLError, str], None] = lambda _error, _address: None,
    ) -> None:
        self._limiter = limiter
        self._served, self._failed = served, failed
        self._tls = TlsTransport(context, server_side=True, on_open=self._open, on_failed=self._fail)
        self._inner: asyncio.Transport | None = None
        self._refusal: PopgateError | None = None
        self._is_counted = self._is_ending = False
        self.body: Body | None = None

    # -- called by the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner = cast("asyncio.Transport", transport)  # in uvloop it has this interface, but not this class
        self._limiter.arrived(self)
        self._is_counted = True
        if self._refusal is None:
            self._limiter.began_head(self)
        else:
            asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self._give_up)
        self._tls.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_ending or self._inner is None:
            return
        if data[0] in FIRST_BYTES_OF_HTTP:
            self._refuse_http()
            return
        self._inner.set_protocol(self._tls)
        self._tls.data_received(data)

    def eof_received(self) -> None:
        """Let the transport close the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    # -- called by the TLS transport --------------------------------------------------------------------------------

    def _open(self, tls: TlsTransport) -> WatchedProtocol:
        self._is_counted = False
        protocol = self._served(self)
        if self._refusal is not None:
            asyncio.get_running_loop().call_soon(protocol.refuse, self._refusal)
        return protocol

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ssl.SSLError) and self._inner is not None:
            self._failed(error, str((self._inner.get_extra_info("peername") or ("",))[0]))
        self._leave()

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._limiter.left(self)

    def _refuse_http(self) -> None:
        self._is_ending = True
        assert self._inner is not None, "it has received data"
        answer = problem_answer(HttpError(400, "https_required", "this port accepts only https: use an https:// URL"))
        self._limiter.is_served(self)
        self._limiter.count_refused(answer.status)
        headers = b"".join(b"%b: %b\r\n" % header for header in answer.headers)
        transport = JoinedWrites(self._inner)
        transport.write(b"HTTP/1.1 400 Bad Request\r\n%bconnection: close\r\n\r\n%b" % (headers, answer.body))
        transport.end()

    def _give_up(self) -> None:
        if self._is_counted and self._refusal is not None:
            self._limiter.count_refused(problem_answer(self._refusal).status)
            self.abort()

    # -- called by the limiter ----------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        return True

    @property
    def waits(self) -> bool:
        return False

    def refuse(self, error: PopgateError) -> None:
        """Close the connection. If it has just arrived, refuse it after the handshake."""
        if not self._is_counted:
            self._refusal = error
        elif not self._is_ending:
            self._limiter.count_refused(problem_answer(error).status)
            self.abort()

    def retire(self) -> bool:
        self.abort()
        return True

    @property
    def user(self) -> object | None:
        return None

    def reached(self) -> int:
        return 0

    @property
    def unsent_bytes(self) -> int:
        return 0

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()
