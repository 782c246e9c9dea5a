"""Runs TLS over a transport of asyncio, with an exact account of the bytes that the other side has not taken.

Theory of operation. asyncio's own TLS transport hides the inner transport: unread bytes leave the buffer that the
protocol sees, a close loses them after a time limit, and each connection reserves 256 KiB. This transport passes every
encrypted byte to the inner transport at once, and forwards the inner transport's flow control. So the protocol sees the
same as over plain TCP.

    protocol --write--> SSLObject --> inner transport        inner transport --> SSLObject --data_received--> protocol

    HANDSHAKE --done--> OPEN --close, write_eof--> SHUT (close_notify sent) --> GONE
        |                 '--close_notify arrived--> SHUT
        '--failed, abort--> GONE

TLS 1.3 lets the other side send control records without content, even before it has authenticated. A KeyUpdate costs
this process much more time than it costs the sender. A connection that receives ``BARREN_BYTES_MAX`` without content is
ended.

A program that closes its socket without having read everything sends close_notify first and then a reset. So the end
that a close_notify announces is reported when the connection ends, or after ``EOF_SECONDS``: until then, the reset can
still arrive.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, cast

from popgate.runtime.tcp_info import acknowledged_bytes

_log = logging.getLogger(__name__)

SLICE_BYTES = 16 << 10
"""Maximum number of bytes that are passed to OpenSSL at once, because it keeps a buffer of this size for each
direction."""
FLUSHED_BYTES = 64 << 10
"""Number of encrypted bytes that are passed to the inner transport at once. Each time costs a system call."""
RECORD_BYTES_MAX = 16 << 10
"""Maximum size of the content of a TLS record (RFC 8446)."""
BARREN_BYTES_MAX = 64 << 10
"""Maximum number of encrypted bytes that may arrive after the handshake beyond what their content accounts for. Each
record with content is smaller (about 16.6 KiB), so only a client that floods the connection with control records
exceeds this. It is also the limit for answers to such records while the other side does not read."""
BARREN_CREDIT = 64
"""Number of encrypted bytes that a record with content accounts for beside its content. TLS needs 22 to 40 of them."""
EOF_SECONDS = 0.25
"""Seconds from a close_notify until the end is reported, if the connection does not end before."""


class Stage(Enum):
    HANDSHAKE = auto()
    OPEN = auto()
    SHUT = auto()
    """close_notify was sent: nothing more can be written, and received data is discarded."""
    GONE = auto()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The protocol of an inner transport, and the transport of another protocol.

    ``on_open`` is called once after the handshake and returns the protocol, whose ``connection_made`` is called then.
    If it raises ssl.SSLError or ConnectionError, no protocol sees the connection. ``on_failed`` is called once if the
    connection ends before, with the reason. ``server_hostname`` is checked and sent (SNI) if it is given.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        on_open: Callable[["TlsTransport"], asyncio.Protocol],
        on_failed: Callable[[Exception], None],
        server_hostname: str | None = None,
    ) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._server_side = server_side
        self._on_open: Callable[[TlsTransport], asyncio.Protocol] | None = on_open
        self._on_failed: Callable[[Exception], None] | None = on_failed
        self._stage = Stage.HANDSHAKE
        self._inner: asyncio.Transport | None = None
        self._protocol: asyncio.Protocol | None = None
        self._error: Exception | None = None
        """The violation of the protocol that ended the connection."""
        self._is_writing_paused = False
        self._end_timer: asyncio.TimerHandle | None = None
        self._is_end_reported = False
        self._barren_bytes = 0
        """Number of encrypted bytes that arrived and that no content accounts for."""
        self._unread_replies = 0
        """Number of bytes that were sent in answer to control records since the other side has stopped reading."""
        self.wire_bytes = 0
        """Number of encrypted bytes, with those of the handshake, that were passed to the inner transport."""
        self.acknowledged_before = 0
        """What the kernel counted as acknowledged before the first encrypted byte."""

    # -- called by the inner transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner = cast("asyncio.Transport", transport)  # in uvloop it has this interface, but not this class
        self.acknowledged_before = acknowledged_bytes(transport.get_extra_info("socket")) or 0
        if not self._server_side:
            self._shake()

    def data_received(self, data: bytes) -> None:
        if self._stage in (Stage.SHUT, Stage.GONE):
            return
        parts: list[bytes] = []
        is_ended = False
        try:
            view = memoryview(data)
            for start in range(0, len(view), SLICE_BYTES):
                self._incoming.write(view[start : start + SLICE_BYTES])
                if self._stage is Stage.HANDSHAKE:
                    if not self._shake():
                        continue
                else:
                    self._barren_bytes += min(SLICE_BYTES, len(view) - start)
                is_ended = self._read(parts)
                if is_ended:
                    break
                if self._barren_bytes >= BARREN_BYTES_MAX:
                    raise ssl.SSLError("too many records without content")
        except (ssl.SSLError, ConnectionError) as error:
            self._deliver(parts)
            self._fail(error)
            return
        if self._outgoing.pending:
            self._reply()
        self._deliver(parts)
        if is_ended:
            self._was_shut()

    def eof_received(self) -> None:
        if self._stage is Stage.HANDSHAKE:
            self._fail(ConnectionAbortedError("the connection was closed during the TLS handshake"))
        self._report_end()

    def connection_lost(self, exc: Exception | None) -> None:
        was, self._stage = self._stage, Stage.GONE
        if was is Stage.HANDSHAKE:
            self._report_failure(exc or ConnectionAbortedError("the connection was closed during the TLS handshake"))
        if self._end_timer is not None and exc is None:
            self._report_end()
        self._cancel_timer()
        if self._protocol is not None:
            protocol, self._protocol = self._protocol, None
            protocol.connection_lost(exc or self._error)

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._unread_replies = 0
        if self._protocol is not None:
            self._protocol.resume_writing()

    # -- TLS --------------------------------------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Continue the handshake. Return whether it is complete. Raises: ssl.SSLError, ConnectionError."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        self._flush()
        self._stage = Stage.OPEN
        assert self._on_open is not None, "the handshake is completed once"
        try:
            self._protocol = self._on_open(self)
            self._on_open = self._on_failed = None  # against a reference cycle
            self._protocol.connection_made(self)
        except (ssl.SSLError, ConnectionError):
            raise
        except Exception as error:
            _log.exception("a connection could not be served after its TLS handshake")
            raise ConnectionAbortedError("the connection could not be served") from error
        if self._is_writing_paused:
            self._protocol.pause_writing()
        return True

    def _read(self, parts: list[bytes]) -> bool:
        """Append the content of the complete records to ``parts``. Return whether the other side has sent
        close_notify. Raises: ssl.SSLError."""
        while self._incoming.pending or self._ssl.pending():
            try:
                part = self._ssl.read(RECORD_BYTES_MAX)
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLZeroReturnError:
                return True
            if not part:
                return True
            parts.append(part)
            self._barren_bytes = max(0, self._barren_bytes - len(part) - BARREN_CREDIT)
        return False

    def _reply(self) -> None:
        """Send what OpenSSL answers to control records, unless the other side asks without reading the answers."""
        if self._is_writing_paused:
            self._unread_replies += self._outgoing.pending
            if self._unread_replies > BARREN_BYTES_MAX:
                self._fail(ssl.SSLError("too many control records, and their answers are not read"))
                return
        self._flush()

    def _deliver(self, parts: list[bytes]) -> None:
        if parts and self._protocol is not None and self._stage in (Stage.OPEN, Stage.SHUT):
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))

    def _was_shut(self) -> None:
        """Report soon that the other side sends nothing more.

        Its close_notify is not answered before that: the other side may be about to close its socket. If it did so with
        an unread answer, its kernel would send a reset instead of FIN, as if it had not read the newest data.
        """
        if self._stage is Stage.OPEN:
            self._stage = Stage.SHUT
            self._end_timer = asyncio.get_running_loop().call_later(EOF_SECONDS, self._ended)

    def _ended(self) -> None:
        self._report_end()
        self._shut()
        if self._inner is not None:
            self._inner.close()

    def _report_end(self) -> None:
        """Tell the protocol once that the other side sends nothing more."""
        self._cancel_timer()
        if self._protocol is not None and not self._is_end_reported:
            self._is_end_reported = True
            self._protocol.eof_received()

    def _shut(self) -> None:
        """Send close_notify after all written bytes."""
        self._stage = Stage.SHUT
        with contextlib.suppress(ssl.SSLError):  # among them SSLWantReadError: the other side has not answered yet
            self._ssl.unwrap()
        self._flush()

    def _fail(self, error: Exception) -> None:
        """End the connection after a violation of the protocol. The other side learns the reason (alert) if it is still
        there."""
        error.__traceback__ = error.__context__ = None  # against a reference cycle
        was, self._stage, self._error = self._stage, Stage.GONE, error
        self._flush()
        if self._inner is not None:
            self._inner.close()
        if self._protocol is None and was is not Stage.GONE:
            self._report_failure(error)

    def _report_failure(self, error: Exception) -> None:
        on_failed, self._on_open, self._on_failed = self._on_failed, None, None  # against a reference cycle
        if on_failed is not None:
            on_failed(error)

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and self._inner is not None and not self._inner.is_closing():
            self.wire_bytes += len(data)
            self._inner.write(data)

    def _cancel_timer(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None

    # -- called by the protocol -------------------------------------------------------------------------------------

    @property
    def ssl_object(self) -> ssl.SSLObject:
        return self._ssl

    @property
    def inner(self) -> asyncio.Transport:
        assert self._inner is not None, "the connection was made"
        return self._inner

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send. Without effect after ``close``, ``write_eof`` or the end of the connection."""
        if self._stage is not Stage.OPEN or not data:
            return
        view = memoryview(data)
        try:
            for start in range(0, len(view), SLICE_BYTES):
                part = view[start : start + SLICE_BYTES]
                while part:
                    part = part[self._ssl.write(part) :]
                if self._outgoing.pending >= FLUSHED_BYTES:
                    self._flush()
            self._flush()
        except ssl.SSLError as error:
            self._fail(error)
            return

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Send close_notify and FIN after the written bytes, and discard what arrives from now on. Raises: OSError."""
        if self._stage is Stage.OPEN:
            self._shut()
        self.inner.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        """Send the written bytes and close_notify, and then close the connection. Nothing is received any more."""
        if self._stage is Stage.OPEN:
            self._shut()
        if self._inner is not None:
            self._inner.close()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()

    @property
    def is_open(self) -> bool:
        """Whether what is written is sent."""
        return self._stage is Stage.OPEN

    def is_closing(self) -> bool:
        return self._stage in (Stage.SHUT, Stage.GONE) or self.inner.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), "buffered protocols are not supported"
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None, "it is open"
        return self._protocol

    def is_reading(self) -> bool:
        return self.inner.is_reading()

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.inner.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self.inner.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Return the number of encrypted bytes that the kernel has not taken."""
        return self.inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._ssl
        if name == "sslcontext":
            return self._ssl.context
        if name == "peercert":
            return self._ssl.getpeercert()
        if name == "cipher":
            return self._ssl.cipher()
        return default if self._inner is None else self._inner.get_extra_info(name, default)
