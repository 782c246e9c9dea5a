"""Extends uvicorn's HTTP protocol in two ways: it informs handlers about their connection, and enforces the limits of
the ``ConnectionLimiter``.

Theory of operation. uvicorn's parser calls methods of the protocol. Between the calls, a connection is at a ``Stage``:

    BETWEEN --on_message_begin--> HEAD --on_headers_complete--> BODY --on_message_complete--> BETWEEN

Limits are checked once for each slice of data and once for each head, never for each header. A request that exceeds a
limit is answered with a problem document, and the connection ends.

If a request is answered in the stage BODY, the rest of its body is discarded (the *farewell*). The connection stays
usable if the rest arrives within ``FAREWELL_SECONDS`` and has at most ``FAREWELL_BYTES_MAX`` bytes. Otherwise the
connection ends after the answer, in such a way that the client can still read it (``JoinedWrites.end``).

Received data is passed to the parser in slices. While a request waits for the answer to an earlier one, no data is
passed, because each waiting request takes a hundred times the memory of its bytes. The remaining data is kept in
``_held``, and reading stops.

The parser treats data after a head with ``Upgrade`` as another protocol. popgate supports no other protocol, but some
clients offer one in each request, even in requests with bodies. Such a head is parsed a second time, without
``Upgrade``.
"""

import asyncio
from enum import IntEnum
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from popgate.api.connection import EXTENSION, Connection
from popgate.api.connection_limiter import Body, ConnectionLimiter, HttpLimits, LimitedConnection
from popgate.api.held_flow import HeldFlow
from popgate.api.known_heads import UNCOUNTED_BYTES_MAX
from popgate.api.problems import HeadTooLarge, HttpError, problem_answer
from popgate.api.rare_waits import RareEvent, RareQueue
from popgate.api.whole_requests import WholeRequestProtocol
from popgate.domain.errors import PopgateError

SLICE_BYTES = 1024
"""Maximum number of bytes that are passed to the parser at once, because they may contain many requests. If the length
of a body is known, all of its remaining bytes are passed at once."""

FAREWELL_BYTES_MAX = 1 << 20
"""Maximum number of bytes of a body that are discarded after the answer before the connection ends. It bounds what a
client without a credential can make the proxy read, and lets a body through that was on its way."""
CHUNKS_MIN, CHUNK_BYTES_MIN = 1_000, 64
"""A body of more than ``CHUNKS_MIN`` chunks is refused if its chunks are smaller than ``CHUNK_BYTES_MIN`` on average,
because the parser needs as much time for each chunk as for kilobytes in one chunk."""


class Stage(IntEnum):
    """The part of a request that is expected next."""

    BETWEEN = 0
    HEAD = 1
    BODY = 2


_BETWEEN, _HEAD, _BODY = Stage


class WatchedProtocol(WholeRequestProtocol):
    """The protocol of one connection. Pass the class as ``http=`` to uvicorn.Config, or create an instance with the
    ``limiter`` that tracks its connection.

    ``after`` is the TLS handshake of this connection, which the limiter has tracked until now.
    """

    _connection: Connection
    _extensions: dict[str, Any]
    __slots__ = (  # a dict with all these keys could not be shared by the instances
        *("_after", "_body_bytes", "_chunks", "_connection", "_content_bytes", "_declined", "_discarded_bytes"),
        *("_extensions", "_head_bytes", "_held", "_held_flow", "_is_unread", "_limiter", "_limits", "_refusal"),
        *("_stage", "_trailer_bytes", "body"),
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        limiter: ConnectionLimiter | None = None,
        after: LimitedConnection | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = cast("Any", RareQueue[Any]())
        self._after = after
        self._limiter = limiter or ConnectionLimiter(HttpLimits(connection_idle_seconds=config.timeout_keep_alive))
        self._limits = self._limiter.limits
        self._stage = _BETWEEN
        self._head_bytes = 0
        self._body_bytes = 0
        """Upper bound for the number of received bytes of the current body."""
        self._content_bytes = 0
        """Number of bytes of the current body in memory that the limiter does not count yet."""
        self._chunks = 0
        self._trailer_bytes = 0
        self._discarded_bytes = 0
        """Number of bytes that arrived in this farewell."""
        self._held = b""
        self._is_unread = False
        """Whether the latest request has been answered, but the kernel has not yet taken the whole answer."""
        self._refusal: PopgateError | None = None
        self._declined = b""
        """The head of a request that offers another protocol, with the offer removed."""
        self.body: Body | None = None

    # -- the connection ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        transport.set_write_buffer_limits(high=0)  # pause_writing: the kernel has not taken all bytes
        self._connection = Connection(transport)
        self._extensions = {EXTENSION: self._connection}
        joined = cast("asyncio.Transport", self._connection.transport)
        super().connection_made(joined)
        self.flow = self._held_flow = HeldFlow(joined)
        if self._after is None:
            self._limiter.arrived(self)
        else:
            self._limiter.continues(self._after, self)
            self._after = None

    def eof_received(self) -> None:
        self._connection.ended(by_client=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._after is not None:  # the connection could not be served after its handshake
            self._limiter.left(self._after)
            return
        self._connection.ended(by_client=exc is not None, abruptly=isinstance(exc, ConnectionError))
        self._limiter.left(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if self._connection.on_shutdown is not None:
            self._connection.on_shutdown()

    def pause_writing(self) -> None:
        self._limiter.must_wait(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._limiter.was_read(self)
        super().resume_writing()
        if self._is_unread:
            self._go_on()

    # -- requests ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._held:
            self._held += data
        elif self._stage is not _BETWEEN or self._is_answering() or self._is_unread:
            self._take(data)
        elif (known := self.known_heads.find(data)) is not None:
            self._connection.request_began()
            self._limiter.is_served(self)
            self.begin(*known, extensions=self._extensions)
        else:
            self.begun_count = 0
            self._take(data)
            if self._stage is _BETWEEN and not self._held:
                self.learn(data, self._content_bytes)

    def _take(self, data: bytes) -> None:
        """Parse ``data``. If a request must wait for the answer to an earlier one, store the data that follows it, and
        stop reading."""
        taken = 0
        while taken < len(data) and not self.transport.is_closing():
            if self.pipeline or self._is_unread:
                self._held = data[taken:]
                self._held_flow.hold()
                self._count_held()
                break
            end = taken + self._slice_bytes()
            self._take_slice(data[taken:end])
            taken = end
        if self._stage is not _BETWEEN and not self.transport.is_closing():
            self._note_unfinished(min(taken, len(data)))

    def _take_held(self) -> None:
        held, self._held = self._held, b""
        self._take(held)
        if not self._held:
            self._held_flow.let_go()

    def _count_held(self) -> None:
        """Count the stored data as memory until the next answer. Behind an unread one, ``unsent_bytes`` counts it."""
        if len(self._held) > UNCOUNTED_BYTES_MAX and not self._is_unread:
            self._limiter.holds(self, len(self._held))

    def _slice_bytes(self) -> int:
        if self._stage is not _BODY:
            return SLICE_BYTES
        return max(SLICE_BYTES, int(self._length().lstrip(b"0") or b"0") - self._body_bytes)

    def _length(self) -> bytes:
        return next((value for name, value in self.headers if name == b"content-length"), b"")

    def _take_slice(self, data: bytes) -> None:
        before = self._stage
        self._feed(data)
        if self._stage is _BODY:
            self._body_bytes += len(data)
            if self._chunks > max(CHUNKS_MIN, self._body_bytes // CHUNK_BYTES_MIN):
                self.refuse(HttpError(400, "invalid_request", "The body has too many small chunks: send larger ones."))
        elif before is not _BODY:
            self._head_bytes += len(data)
            fields = len(self.headers) if self._stage is _HEAD else 0  # each takes far more memory than bytes
            if self._head_bytes > self._limits.head_bytes_max or fields > self._limits.head_fields_max:
                self.refuse(self._too_long(len(self.url) if self._stage is _HEAD else 0))

    def _feed(self, data: bytes) -> None:
        parser: Any = self.parser  # a parser exists until the connection is lost
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            head, self._declined = self._declined, b""
            self.parser = httptools.HttpRequestParser(self)  # this one takes nothing after ``Connection: close``
            self._feed(head + data[offered.args[0] :])
        except httptools.HttpParserError:
            self.refuse(self._refusal or HttpError(400, "invalid_request", "Invalid HTTP request received."))

    def _note_unfinished(self, size: int) -> None:
        if self._stage is _BODY:
            if not self.cycle.response_complete:
                held, self._content_bytes = self._content_bytes, 0
                self._limiter.body_grew(self, size, held)
                return
            self._discarded_bytes += size
            if self._discarded_bytes > FAREWELL_BYTES_MAX:
                self._connection.transport.end()
        elif self._stage is _HEAD and not self._is_answering():
            self._limiter.began_head(self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._stage = _HEAD
        self._connection.request_began()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore the fields behind a chunked body (trailers), which the parser reports, too. The request is being
        answered by then, and its headers must not change."""
        if self._stage is not _BODY:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > self._limits.head_bytes_max:
            self._refusal = self._too_long(0)
            raise self._refusal

    def on_headers_complete(self) -> None:
        if len(self.headers) > self._limits.head_fields_max or len(self.url) > self._limits.path_bytes_max:
            self._refusal = self._too_long(len(self.url))
            raise self._refusal
        parser: Any = self.parser
        if parser.should_upgrade() and (method := parser.get_method()) != b"CONNECT":
            lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            start = b"%b %b HTTP/%b" % (method, self.url, parser.get_http_version().encode())
            self._declined = b"\r\n".join([start, *lines, b"", b""])
            return
        super().on_headers_complete()
        self.cycle.message_event = RareEvent()
        self._head_bytes = self._body_bytes = self._chunks = self._trailer_bytes = 0
        self._discarded_bytes = self._content_bytes = 0
        self._stage = _BODY
        self._connection.transport.is_receiving = True
        self._limiter.is_served(self)

    def on_body(self, body: bytes) -> None:
        self._content_bytes += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_message_complete(self) -> None:
        if self._declined:
            return
        if (self.body is not None or self._content_bytes > UNCOUNTED_BYTES_MAX) and not self.cycle.response_complete:
            self._limiter.holds(self, self._content_bytes)
            if self.transport.is_closing():  # it was refused
                return
        self._stage = _BETWEEN
        self._connection.transport.is_receiving = False
        self._limiter.body_ended(self)
        if self.cycle.response_complete:
            self._limiter.discarded_rest(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Do the same as uvicorn, but without a timer for each request. The limiter has one timer for all
        connections."""
        self.server_state.total_requests += 1
        if self.body is not None:
            self._limiter.body_answered(self)
        if not self.pipeline:
            # A refused body was not read, and would stay in memory until the next request.
            self.cycle.body = bytearray()
        if self.transport.is_closing():
            if self._stage is _BODY and not self._is_answering():
                self._limiter.says_farewell(self)
            return
        self.flow.resume_reading()
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request. If the kernel has not yet taken the answer to the earlier one, wait for this:
        otherwise the next answer would be in memory, too."""
        self._is_unread = self.flow.write_paused
        if self._is_unread:
            return
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        if self._held and self.pipeline:
            self._count_held()
        elif self._held:
            self._take_held()
        if self._is_answering() or self.transport.is_closing():
            return
        if self._stage is _BETWEEN:
            self._limiter.is_idle(self)
        elif self._stage is _HEAD:
            self._limiter.began_head(self)
        else:
            self._limiter.says_farewell(self)
            if not self._length():  # the rest would have to be parsed to find its end
                self._connection.transport.end()

    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first head
        return cycle is not None and not cycle.response_complete

    def _too_long(self, path_bytes: int) -> HeadTooLarge:
        limits = self._limits
        if path_bytes > limits.path_bytes_max:
            return HeadTooLarge(f"the path is longer than {limits.path_bytes_max} bytes", status=414)
        if len(self.headers or ()) > limits.head_fields_max:
            return HeadTooLarge(f"there are more than {limits.head_fields_max} headers; send fewer")
        return HeadTooLarge(f"the headers are larger than {limits.head_bytes_max} bytes; send less")

    # -- called by the limiter -----------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        return not self.flow.read_paused and not self._held

    @property
    def waits(self) -> bool:
        return self._connection.presence is not None

    def refuse(self, error: PopgateError) -> None:
        """Answer with ``error``, and close the connection.

        Close the connection without this answer if an earlier request has not been answered, or if the request's own
        answer has begun.
        """
        if self.transport.is_closing():
            return
        answer = problem_answer(error)
        self._limiter.count_refused(answer.status)
        if self._is_answering():
            if self.pipeline or self._stage is not _BODY or self.cycle.response_started:
                self.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._stage is _BODY:
            self._connection.transport.end()  # the request was already answered
            return
        headers = [*self.server_state.default_headers, *answer.headers, (b"connection", b"close")]
        head = b"".join([STATUS_LINE[answer.status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n"])
        self.transport.write(head + answer.body)
        self._connection.transport.end()
        if self._stage is _BODY:
            self._limiter.says_farewell(self)

    def retire(self) -> bool:
        if self._stage is not _BODY and self._connection.unsent_bytes():
            return False
        self.transport.close()
        return True

    @property
    def user(self) -> object | None:
        return self._connection.user

    def reached(self) -> int:
        return self._connection.reached()

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes() + len(self._held)

    def abort(self) -> None:
        self._connection.ended(by_client=False, is_cut=True)
        self.transport.abort()
