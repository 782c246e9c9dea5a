"""Parses the deliveries, returned messages and confirms of one AMQP channel, and passes them to the channel's handler.

A parser buffers the frames of a message that is still incomplete, and the deliveries and confirms of the present chunk
of data. `frame_interceptor` finds the frames in the chunk.
"""

import logging
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, Protocol, TypeAlias

RawDelivery: TypeAlias = tuple[bytes, int, int, bytes, bytes, bytes]
"""Consumer tag, delivery tag, redelivered (0 or 1), exchange and routing key, properties, body. The ``bytes`` values
have the encoding of the AMQP frames."""
Confirm: TypeAlias = tuple[int, bool, bool]
"""Sequence number, whether the confirm also covers all earlier numbers, and whether the broker accepted the message."""

METHOD, HEADER, BODY = 1, 2, 3
"""Types of frames."""
FRAME_END = 0xCE
_RETURN, _DELIVER = b"\x00\x3c\x00\x32", b"\x00\x3c\x00\x3c"
_ACK, _NACK = b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x78"

_u16 = Struct(">H").unpack_from
_u64 = Struct(">Q").unpack_from
_u64_octet = Struct(">QB").unpack_from
_frame = Struct(">BHI").unpack_from
_content_header = Struct(">BHIHHQ").unpack_from
"""The head of a content header frame, and its payload up to the size of the body."""
_SMALLEST_CONTENT_BYTES = 7 + 14 + 1 + 7 + 1
"""Number of bytes of a content header frame without properties, and of a body frame without a body."""

_log = logging.getLogger(__name__)


class CloseReason(NamedTuple):
    """The reason why a channel or a connection ended, or why the broker returned a message.

    ``code``: the broker's reply code, or 0 if the network or popgate ended the channel or connection.
    """

    code: int
    text: str


class ChannelHandler(Protocol):
    """Receives the deliveries, confirms and returned messages of a channel. `on_closed` is called once, as the last.

    If a method raises, `on_closed` is called, and the handler must close the channel. Other channels are not affected.
    """

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None: ...

    def on_confirms(self, confirms: list[Confirm]) -> None: ...

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        """The broker could not route a published message to a queue. The confirm of this message arrives later."""
        ...

    def on_cancelled(self) -> None:
        """The broker ended the channel's consumer, for example because the queue was deleted."""
        ...

    def on_closed(self, reason: CloseReason) -> None:
        """The channel or its connection has ended. Nothing may be written to the channel any more."""
        ...


class MalformedError(Exception):
    """The broker sent data that AMQP does not allow, so that no further data of the connection can be parsed."""


class ChannelParser:
    """Parses the deliveries, returned messages and confirms of one channel, and calls ``handler``.

    While the channel is being closed, ``handler`` is None, and this traffic is dropped.
    """

    __slots__ = ("_body_parts", "_confirms", "_deliver", "_deliveries", "_left", "_properties", "_returned", "handler")

    def __init__(self, handler: ChannelHandler) -> None:
        self.handler: ChannelHandler | None = handler
        self._deliveries: list[RawDelivery] = []
        self._confirms: list[Confirm] = []
        # A message whose frames are still arriving: first the method (`_deliver` or `_returned`), then the properties,
        # then the body.
        self._deliver: tuple[bytes, int, int, bytes] | None = None
        self._returned: CloseReason | None = None
        self._properties: bytes | None = None
        self._left = 0
        self._body_parts: list[bytes] = []

    def take(self, kind: int, data: bytes, start: int, end: int) -> bool:
        """Parse a frame's payload, `data[start:end]`.

        Return False if the frame is not part of a delivery, a returned message or a confirm.
        """
        if kind == BODY:
            self._take_body(data[start:end])
        elif kind == HEADER:
            if self._properties is not None or (self._deliver is None and self._returned is None):
                raise MalformedError("an unexpected content header")
            self._left = _u64(data, start + 4)[0]
            self._properties = data[start + 12 : end]
            if not self._left:
                self._complete(b"")
        elif kind != METHOD:
            return False
        else:
            method = data[start : start + 4]
            if method == _DELIVER:
                self._check_idle()
                after_tag = start + 5 + data[start + 4]
                tag, redelivered = _u64_octet(data, after_tag)
                self._deliver = (data[start + 5 : after_tag], tag, redelivered, data[after_tag + 9 : end])
            elif method == _ACK:
                tag, bits = _u64_octet(data, start + 4)
                self._confirms.append((tag, bits & 1 == 1, True))
            elif method == _NACK:
                tag, bits = _u64_octet(data, start + 4)
                self._confirms.append((tag, bits & 1 == 1, False))
            elif method == _RETURN:
                self._check_idle()
                self._returned = CloseReason(_u16(data, start + 4)[0], short_string(data, start + 6))
            else:
                return False
        return True

    def take_delivery(self, data: bytes, start: int, end: int, number: int) -> int:
        """Parse a delivery of channel ``number`` whose frames are all in ``data``, with its body in one frame.

        ``data[start:end]`` is the payload of a method frame. Return the position after the delivery. Return 0 if the
        frame does not begin such a delivery: the frames must then be parsed one by one.
        """
        header = end + 1
        if data[start : start + 4] != _DELIVER or len(data) - header < _SMALLEST_CONTENT_BYTES:
            return 0
        kind, header_number, length, _, _, size = _content_header(data, header)
        body = header + 8 + length
        if kind != HEADER or header_number != number or len(data) - body < 8 or data[body - 1] != FRAME_END:
            return 0
        kind, body_number, length = _frame(data, body)
        stop: int = body + 7 + length
        if kind != BODY or body_number != number or length != size or stop >= len(data) or data[stop] != FRAME_END:
            return 0
        self._check_idle()
        after_tag = start + 5 + data[start + 4]
        tag, redelivered = _u64_octet(data, after_tag)
        routing, properties = data[after_tag + 9 : end], data[header + 19 : body - 1]
        self._deliveries.append(
            (data[start + 5 : after_tag], tag, redelivered, routing, properties, data[body + 7 : stop])
        )
        return stop + 1

    def _take_body(self, part: bytes) -> None:
        if self._properties is None or len(part) > self._left:
            raise MalformedError("more content than was announced")
        self._left -= len(part)
        if self._left:
            self._body_parts.append(part)
        elif self._body_parts:
            self._body_parts.append(part)
            body = b"".join(self._body_parts)
            self._body_parts.clear()
            self._complete(body)
        else:
            self._complete(part)

    def _complete(self, body: bytes) -> None:
        properties, self._properties = self._properties, None
        assert properties is not None
        if self._deliver is not None:
            self._deliveries.append((*self._deliver, properties, body))
            self._deliver = None
        elif self._returned is not None:
            reason, self._returned = self._returned, None
            self._tell(lambda handler: handler.on_returned(reason, properties))

    def _check_idle(self) -> None:
        if self._deliver is not None or self._returned is not None:
            raise MalformedError("a message inside another one")

    def hand_over(self) -> None:
        """Pass the deliveries of the last chunk of data to the handler in one call, and its confirms in another one."""
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._tell(lambda handler: handler.on_deliveries(deliveries))
        if self._confirms:
            confirms, self._confirms = self._confirms, []
            self._tell(lambda handler: handler.on_confirms(confirms))

    def cancelled(self) -> None:
        """Tell the handler that the broker has ended the channel's consumer."""
        self.hand_over()
        self._tell(lambda handler: handler.on_cancelled())

    def close(self, reason: CloseReason) -> None:
        """Tell the handler that the channel, or its connection, has ended."""
        self.hand_over()
        self._close(reason)

    def _tell(self, call: Callable[[ChannelHandler], None]) -> None:
        """Call the handler. If the handler raises, close its channel.

        Without this, the exception would end the connection and all of its channels.
        """
        if self.handler is None:
            return
        try:
            call(self.handler)
        except Exception as error:
            _log.exception("a channel to RabbitMQ is closed after an internal error")
            self._close(CloseReason(0, f"popgate failed on what RabbitMQ sent: {type(error).__name__}: {error}"))

    def _close(self, reason: CloseReason) -> None:
        handler, self.handler = self.handler, None
        if handler is None:
            return
        try:
            handler.on_closed(reason)
        except Exception:
            _log.exception("an internal error while a channel to RabbitMQ was closed")


def short_string(data: bytes, start: int) -> str:
    """Return the AMQP short string at `start`: one byte with the length, then the text."""
    return data[start + 1 : start + 1 + data[start]].decode(errors="replace")
