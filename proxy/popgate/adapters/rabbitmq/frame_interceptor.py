"""Extracts deliveries and confirms from an AMQP connection before aiormq's frame reader reads them.

This module reads the bytes of one connection; it does not interpret messages. aiormq takes 60 to 200 us for each
message (measured), because it needs three frames and two tasks for each message, and three awaits for each frame. This
module parses many whole frames at once, which takes 2 to 3 us for each message. aiormq reads from a `StreamReader` that
this module provides through aiormq's extension point for transports. For channels that have a handler, this stream
reader extracts

- Basic.Deliver with its content,
- Basic.Ack and Basic.Nack,
- Basic.Return with its content.

The stream reader passes all other frames on to aiormq unchanged: aiormq processes the handshake, heartbeats, RPCs and
errors. The handler receives the extracted frames synchronously, while the chunk of data in which they arrived is
processed.

The broker's order within a channel is preserved: a caller gets the answer to an RPC only after the handler has received
the deliveries that the broker sent before the answer. After the end of a channel, the handler receives no deliveries.
The memory needed is limited to one frame and the prefetch of each channel, because the broker may not send more.
"""

import asyncio
import struct
from collections.abc import Callable
from struct import Struct
from typing import Any

from aiormq.connection import TransportFactory
from yarl import URL

from popgate.adapters.rabbitmq.channel_parser import (
    FRAME_END,
    METHOD,
    ChannelHandler,
    ChannelParser,
    CloseReason,
    MalformedError,
    short_string,
)

FRAME_OVERHEAD_BYTES = 8
HANDSHAKE_FRAME_BYTES_MAX = 1024 * 1024
"""Maximum number of bytes in a frame until the broker has sent its own maximum. A handshake needs far fewer bytes."""
SYNTHETIC_HEARTBEAT_SECONDS = 1.0
JOINED_BYTES_MAX = 64 * 1024
"""Number of bytes of frames from which on they are written at once. A larger write gains nothing, and its copy costs
more than a system call."""

_HEARTBEAT = 8
_HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_TUNE, _CONNECTION_CLOSE = b"\x00\x0a\x00\x1e", b"\x00\x0a\x00\x32"
_BLOCKED, _UNBLOCKED = b"\x00\x0a\x00\x3c", b"\x00\x0a\x00\x3d"
_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK = b"\x00\x14\x00\x28", b"\x00\x14\x00\x29"
_CANCEL = b"\x00\x3c\x00\x1e"

_frame = Struct(">BHI").unpack_from
_u16 = Struct(">H").unpack_from
_u32 = Struct(">I").unpack_from


class FrameInterceptor(asyncio.StreamReader):
    """The stream reader of an aiormq connection. It also lets popgate write whole frames without aiormq.

    `on_end` is called once, when the connection has ended. `on_blocked` is called with the broker's reason when the
    broker stops reading published messages because of a memory or disk alarm. It is called with None when the broker
    resumes reading. `now` returns the time; by default, it is the event loop's clock.
    """

    def __init__(
        self,
        *,
        on_end: Callable[[CloseReason], None],
        on_blocked: Callable[[str | None], None],
        now: Callable[[], float] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(loop=loop)
        self.ended: CloseReason | None = None
        self._now = now or loop.time
        self._on_end = on_end
        self._on_blocked = on_blocked
        self._parsers: dict[int, ChannelParser] = {}
        self._partial = bytearray()
        self._needed = 0
        self._frame_bytes_max = HANDSHAKE_FRAME_BYTES_MAX
        self._fed_through_at = 0.0
        self._broken = False
        self._heard = False
        self._writer: asyncio.StreamWriter | None = None
        self._soon: list[bytes] = []
        self._soon_bytes = 0

    # ------------------------------------------------------------ for channels

    def attach(self, channel_number: int, handler: ChannelHandler) -> None:
        """Pass this channel's deliveries, confirms and returned messages to `handler`.

        The channel must be open, and no delivery, confirm or returned message may have arrived on it yet. If the
        connection has already ended, `handler.on_closed` is called at once.
        """
        if self.ended is not None:
            handler.on_closed(self.ended)
            return
        self._parsers[channel_number] = ChannelParser(handler)

    def discard(self, channel_number: int) -> None:
        """Stop calling the channel's handler, and drop its deliveries and confirms until the channel closes."""
        parser = self._parsers.get(channel_number)
        if parser is not None:
            parser.handler = None

    def write(self, frames: bytes) -> None:
        """Send whole frames after all earlier writes. Do nothing if the connection has ended."""
        if self._soon:
            self._write_joined()
        if self._writer is not None and self.ended is None:
            self._writer.write(frames)

    def write_soon(self, frames: bytes) -> None:
        """Send whole frames like `write`, but join those of one turn of the event loop in one write.

        They are sent before the event loop processes any data that arrives after this call. So they also precede
        aiormq's confirmation that their channel was closed, after which no frame may follow.
        """
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._write_joined)
        self._soon.append(frames)
        self._soon_bytes += len(frames)
        if self._soon_bytes >= JOINED_BYTES_MAX:
            self._write_joined()

    def _write_joined(self) -> None:
        frames, self._soon = self._soon, []
        self._soon_bytes = 0
        if frames:
            self.write(frames[0] if len(frames) == 1 else b"".join(frames))

    async def drain(self) -> None:
        """Wait until the kernel has accepted all bytes that were written. Raises: OSError."""
        self._write_joined()
        if self._writer is not None:
            await self._writer.drain()

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that were written but that the kernel has not accepted yet."""
        written = 0 if self._writer is None else self._writer.transport.get_write_buffer_size()
        return written + self._soon_bytes

    def was_heard(self) -> bool:
        """Return whether the broker has sent any data since the last call of this method."""
        heard, self._heard = self._heard, False
        return heard

    def abort(self) -> None:
        """Abort the TCP connection at once, without the AMQP close handshake."""
        if self._writer is not None:
            self._writer.transport.abort()

    def end(self, reason: CloseReason) -> None:
        """Report the end of the connection to every channel's handler and to `on_end`. A second call does nothing."""
        if self.ended is not None:
            return
        self.ended = reason
        parsers = list(self._parsers.values())
        self._parsers.clear()
        for parser in parsers:
            parser.close(reason)
        self._on_end(reason)

    # ------------------------------------------------------------ for the transport

    def own_writer(self, writer: asyncio.StreamWriter) -> None:
        """Use `writer` for all writes. The transport factory calls this method once, before any data is read."""
        # With these limits, `drain` waits until the buffer is empty. A high limit of 0 would not work, because
        # asyncio's TLS transport misinterprets it.
        writer.transport.set_write_buffer_limits(high=1, low=0)
        self._writer = writer

    def feed_data(self, data: Any) -> None:
        """Process data that has arrived. If the last frame is incomplete, buffer it until the rest of it arrives."""
        self._heard = True
        if self._broken:
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        try:
            rest = self._take_frames(data)
        except (MalformedError, struct.error, IndexError) as error:
            self._break(str(error))
            return
        if rest < len(data):
            self._partial += memoryview(data)[rest:]

    def feed_eof(self) -> None:
        if self._partial and not self._broken:
            super().feed_data(bytes(self._partial))  # aiormq then fails, because it waits for a whole frame
        super().feed_eof()
        self.end(CloseReason(0, "RabbitMQ closed the connection"))

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.end(CloseReason(0, f"the connection to RabbitMQ was lost: {exc}"))

    def _break(self, what: str) -> None:
        self._broken = True
        self._partial.clear()
        self.set_exception(ConnectionError(f"malformed frame: {what}"))
        self.abort()

    # ------------------------------------------------------------ frames

    def _take_frames(self, data: bytes) -> int:
        """Process every complete frame of `data`. Return the position after the last complete frame."""
        parsers = self._parsers
        position, size = 0, len(data)
        run = 0  # the start of the frames that were not yet passed on to aiormq
        through: list[bytes] = []
        busy: dict[int, ChannelParser] = {}
        while True:
            if size - position < FRAME_OVERHEAD_BYTES:
                self._needed = FRAME_OVERHEAD_BYTES
                break
            kind, number, length = _frame(data, position)
            start = position + 7
            end = start + length
            if end >= size:
                if length + FRAME_OVERHEAD_BYTES > self._frame_bytes_max:
                    raise MalformedError(f"{length} bytes, but the agreed maximum is {self._frame_bytes_max}")
                self._needed = length + FRAME_OVERHEAD_BYTES
                break
            if data[end] != FRAME_END:
                raise MalformedError("the frame end is missing")
            parser = parsers.get(number)
            if parser is not None and kind == METHOD and (after := parser.take_delivery(data, start, end, number)):
                if run < position:
                    through.append(data[run:position])
                run = position = after
                busy[number] = parser
                continue
            if parser is not None and parser.take(kind, data, start, end):
                if run < position:
                    through.append(data[run:position])
                run = end + 1
                busy[number] = parser
            elif kind == METHOD:
                self._observe(number, parser, data[start:end])
            elif kind != _HEARTBEAT and parser is not None:
                raise MalformedError(f"an unexpected frame of type {kind}")
            position = end + 1
        if run < position:
            through.append(data[run:position])
        for parser in busy.values():
            parser.hand_over()
        if through:
            super().feed_data(through[0] if len(through) == 1 else b"".join(through))
            self._fed_through_at = self._now()
        elif busy and self._now() - self._fed_through_at >= SYNTHETIC_HEARTBEAT_SECONDS:
            # The broker sends heartbeats only when it has nothing else to send. If all frames of a busy connection are
            # extracted, aiormq would receive nothing, consider the connection dead, and close it.
            super().feed_data(_HEARTBEAT_FRAME)
            self._fed_through_at = self._now()
        return position

    def _observe(self, number: int, parser: ChannelParser | None, method: bytes) -> None:
        """Inspect a method frame that aiormq will also get, and update the state of its channel or the connection."""
        name = method[:4]
        if number == 0:
            if name == _TUNE:
                self._frame_bytes_max = _u32(method, 6)[0] or 0xFFFF_FFFF
            elif name == _BLOCKED:
                self._on_blocked(short_string(method, 4))
            elif name == _UNBLOCKED:
                self._on_blocked(None)
            elif name == _CONNECTION_CLOSE:
                self.end(CloseReason(_u16(method, 4)[0], short_string(method, 6)))
        elif parser is not None:
            if name == _CANCEL:
                parser.cancelled()
            elif name == _CHANNEL_CLOSE:
                del self._parsers[number]
                parser.close(CloseReason(_u16(method, 4)[0], short_string(method, 6)))
            elif name == _CHANNEL_CLOSE_OK:
                del self._parsers[number]
                parser.close(CloseReason(0, "the channel was closed"))


class InterceptorFactory(TransportFactory):
    """Creates the transport of an aiormq connection that `interceptor` reads. TLS works as in aiormq's own factory."""

    def __init__(self, interceptor: FrameInterceptor) -> None:
        self._interceptor = interceptor

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        context_provider = kwargs.pop("ssl_context_provider")
        context = await context_provider.get_context() if url.scheme == "amqps" else None
        protocol = asyncio.StreamReaderProtocol(self._interceptor, loop=loop)
        host, port = url.host or "", url.port or 0  # both are set, because aiormq fills in the scheme's port
        transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=context, **kwargs)
        writer = asyncio.StreamWriter(transport, protocol, self._interceptor, loop)
        self._interceptor.own_writer(writer)
        return self._interceptor, writer
