"""Parses the message traffic of one AMQP channel, frame by frame, and passes it to the channel's handler.

Owns a message whose frames are still arriving, and what a chunk of data has brought. `frame_interceptor` finds the
frames.
"""

import logging
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, Protocol, TypeAlias

RawDelivery: TypeAlias = tuple[bytes, int, int, bytes, bytes, bytes]
"""Consumer tag, delivery tag, redelivered (0 or 1), exchange and routing key, properties, body. The bytes are as on the
wire."""
Confirm: TypeAlias = tuple[int, bool, bool]
"""Sequence number, whether the confirm also covers all earlier numbers, and whether the broker accepted the message."""

METHOD, HEADER, BODY = 1, 2, 3
"""Types of frames."""
_RETURN, _DELIVER = b"\x00\x3c\x00\x32", b"\x00\x3c\x00\x3c"
_ACK, _NACK = b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x78"

_u16 = Struct(">H").unpack_from
_u64 = Struct(">Q").unpack_from
_u64_octet = Struct(">QB").unpack_from

_log = logging.getLogger(__name__)


class CloseReason(NamedTuple):
    """Why a channel or a connection ended: the broker's reply code, or 0 if the network or popgate ended it."""

    code: int
    text: str


class ChannelHandler(Protocol):
    """Receives the message traffic of a channel. `on_closed` is called once, as the last call.

    If a handler raises, only its channel ends: `on_closed` is called, and the handler closes the channel.
    """

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None: ...

    def on_confirms(self, confirms: list[Confirm]) -> None: ...

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        """The broker could not route a message. The message's confirm arrives later."""
        ...

    def on_cancelled(self) -> None:
        """The broker ended the channel's consumer, for example because the queue was deleted."""
        ...

    def on_closed(self, reason: CloseReason) -> None:
        """The channel or the connection has ended. Nothing may be written to the channel any more."""
        ...


class MalformedError(Exception):
    """The broker sent data that AMQP does not allow. The connection can't be read any further."""


class ChannelParser:
    """Parses the traffic of one channel. A channel that is being closed has no handler, and its traffic is dropped."""

    __slots__ = ("_body_parts", "_confirms", "_deliver", "_deliveries", "_left", "_properties", "_returned", "handler")

    def __init__(self, handler: ChannelHandler) -> None:
        self.handler: ChannelHandler | None = handler
        self._deliveries: list[RawDelivery] = []
        self._confirms: list[Confirm] = []
        # The content that is arriving. `_deliver` or `_returned` announces it; its properties follow, and then its
        # body.
        self._deliver: tuple[bytes, int, int, bytes] | None = None
        self._returned: CloseReason | None = None
        self._properties: bytes | None = None
        self._left = 0
        self._body_parts: list[bytes] = []

    def take(self, kind: int, data: bytes, start: int, end: int) -> bool:
        """Handle a frame's payload, `data[start:end]`. Return False if it is not message traffic."""
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
        """Pass on what the last chunk of data has brought, in one call for deliveries and one for confirms."""
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._tell(lambda handler: handler.on_deliveries(deliveries))
        if self._confirms:
            confirms, self._confirms = self._confirms, []
            self._tell(lambda handler: handler.on_confirms(confirms))

    def cancelled(self) -> None:
        """The broker has ended the channel's consumer."""
        self.hand_over()
        self._tell(lambda handler: handler.on_cancelled())

    def close(self, reason: CloseReason) -> None:
        """Note the end of the channel, or of the connection."""
        self.hand_over()
        self._close(reason)

    def _tell(self, call: Callable[[ChannelHandler], None]) -> None:
        """Call the handler. If it raises, only its channel ends.

        Without this, the exception would end the connection.
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
    """Return the text at `start`, which begins with one byte for its length."""
    return data[start + 1 : start + 1 + data[start]].decode(errors="replace")
