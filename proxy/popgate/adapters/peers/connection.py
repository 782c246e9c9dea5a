"""Manages one HTTP/1.1 connection over TLS to a peer proxy. The connection carries one request at a time.

Every pop that is forwarded to another proxy uses this module, so its CPU time matters. It needs 0.05 to 0.2 ms for a
request. httpx, or httpcore, on which httpx is built, would need 1.4 to 1.6 ms, and more than 3 ms with 32 simultaneous
requests.

This module only sends requests and receives answers. The caller decides which requests may be sent again on another
connection.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from functools import partial
from typing import cast

from httptools import HttpParserError, HttpResponseParser

from popgate.adapters.peers.identity import AnotherPeer, ForeignPeer, named_instance
from popgate.domain.names import InstanceId
from popgate.ports.peers import ForwardedAnswer
from popgate.runtime.tls_transport import TlsTransport

CONNECT_SECONDS = 1.0
"""Maximum seconds until a new connection can be used, with its TLS handshake."""
ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""Maximum number of bytes in an answer. No answer of a proxy reaches this: the answer to a pop has at most 32 MiB."""
HEADERS_MAX = 128
"""Maximum number of header lines of an answer."""
JOINED_BYTES_MAX = 64 * 1024
"""Maximum number of bytes in a request body that is joined with the head, so that one system call sends both. For a
larger body, a second system call is cheaper than the copy."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_FIRST_FINAL_STATUS = 200


class PeerConnection(asyncio.Protocol):
    """A connection to a peer proxy. ``connect`` creates it."""

    def __init__(self, on_lost: Callable[["PeerConnection"], None]) -> None:
        self._on_lost = on_lost
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[ForwardedAnswer] | None = None
        self._on_head: Callable[[int], None] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._may_be_kept = True
        self.heard = False
        """Whether any bytes of an answer to the latest request have arrived."""

    @property
    def is_usable(self) -> bool:
        """Whether the connection appears to be open for another request."""
        return self._may_be_kept and self._transport is not None and not self._transport.is_closing()

    @property
    def peer_host(self) -> str:
        """The address of the connected peer."""
        assert self._transport is not None, "it is connected"
        host: str = self._transport.get_extra_info("peername")[0]
        return host

    async def exchange(
        self, head: bytes, body: bytes = b"", *, on_head: Callable[[int], None] | None = None
    ) -> ForwardedAnswer:
        """Send a request and return the complete answer. Raises: ConnectionError.

        ``on_head`` is called with the answer's status when the head of the answer has arrived. If this method raises or
        is cancelled, the caller must close the connection, because the state of its byte stream is unknown.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._answered = asyncio.get_running_loop().create_future()
        self._on_head = on_head
        self._headers, self._parts, self._size, self.heard = [], [], 0, False
        if len(body) <= JOINED_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        try:
            return await self._answered
        finally:
            self._answered = None  # an idle connection must not keep the last answer in memory

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._may_be_kept = False
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close the connection with a TCP reset.

        The reset tells the peer that its answer was not read, even if the answer has already arrived at this proxy.
        """
        self._may_be_kept = False
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # the socket is already closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    # -- events from asyncio ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # in uvloop it has this interface, but not this class

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            self.close()  # no request is waiting for data
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, ValueError) as error:
            self._fail(ConnectionError(f"its answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_be_kept = False
        self._transport = None  # the parser refers to this object, so the TLS state would wait for the collector
        if isinstance(exc, ssl.SSLError):
            self._fail(ForeignPeer(_reason(exc)))  # it does not accept the certificate of this proxy
        else:
            self._fail(ConnectionResetError("it closed the connection" if exc is None else str(exc)))
        self._on_lost(self)

    # -- events from the parser -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._headers) >= HEADERS_MAX:
            raise ValueError(f"more than {HEADERS_MAX} header lines")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._on_head is not None:
            self._on_head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX >> 20} MiB")
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            self._headers = []
            return
        self._may_be_kept = self._may_be_kept and self._parser.should_keep_alive()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(ForwardedAnswer(status, self._headers, b"".join(self._parts)))
        self._parts = []

    def _fail(self, error: ConnectionError) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


async def connect(
    host: str, port: int, context: ssl.SSLContext, wanted: InstanceId, on_lost: Callable[[PeerConnection], None]
) -> PeerConnection:
    """Open a new connection to the proxy ``wanted``. Until it has proved that it is this proxy, it receives nothing but
    the messages of the TLS handshake.

    Raises: OSError, which includes TimeoutError; AnotherPeer if another proxy of the cluster is at the address;
    ForeignPeer if what is there does not belong to the cluster.
    """
    opening = _Opening(wanted, on_lost)
    tls = TlsTransport(context, server_side=False, on_open=opening.open, on_failed=opening.fail)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await _open(tls, host, port)
            return await opening.connected
    except BaseException:
        opening.connected.cancel()
        tls.abort()
        raise
    finally:
        del opening, tls  # an error refers to this frame, so that they would wait for the collector


async def _open(tls: TlsTransport, host: str, port: int) -> None:
    """Connect ``tls`` to ``host``. Raises: OSError."""
    try:
        await asyncio.get_running_loop().create_connection(partial(_same, tls), host, port)
    except ValueError as error:  # UnicodeError: a part of the name is too long to be looked up
        raise OSError(f"its host name can't be used ({error})") from error


class _Opening:
    """A connection to the proxy ``wanted`` that is being opened."""

    def __init__(self, wanted: InstanceId, on_lost: Callable[[PeerConnection], None]) -> None:
        self._wanted, self._on_lost = wanted, on_lost
        self.connected: asyncio.Future[PeerConnection] = asyncio.get_running_loop().create_future()

    def open(self, tls: TlsTransport) -> PeerConnection:
        """Return the protocol of the connection. Raises: AnotherPeer."""
        found = named_instance(tls.ssl_object)
        if found != self._wanted:
            raise AnotherPeer(found)
        connection = PeerConnection(self._on_lost)
        if not self.connected.done():
            self.connected.set_result(connection)
        return connection

    def fail(self, error: Exception) -> None:
        if not self.connected.done():
            is_foreign = isinstance(error, ssl.SSLError)
            self.connected.set_exception(ForeignPeer(_reason(error)) if is_foreign else error)


def _same(tls: TlsTransport) -> TlsTransport:
    return tls


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
