"""Implements the channel for publishing: builds the frames of messages, and assigns the broker's confirms to them.

This module numbers the messages, records the unconfirmed ones, and limits their count and bytes (the window). It waits
only for room in the window. The broker also numbers the messages of a channel, from 1. It confirms them by number, in
any order: one message, or all messages up to a number. If no queue accepted a mandatory message, the broker returns the
message before it confirms it. The copy id identifies the returned message.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import repeat
from struct import Struct
from typing import TypeAlias

from aiormq.abc import AbstractChannel

from popgate.adapters.rabbitmq.channel_parser import CloseReason, Confirm, RawDelivery
from popgate.adapters.rabbitmq.delay_key import delay_key, entry_level, whole_seconds
from popgate.adapters.rabbitmq.delay_levels import entrance_name
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.properties import decode, encode
from popgate.adapters.rabbitmq.session import Session
from popgate.domain.identity import IdentityKeys, Signer
from popgate.domain.names import BrokerQueue, TopicName, bound_queue, exchange_name
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus

ROUTES_MAX = 4096
RETURNED_MAX = 100_000
SHORT_STRING_BYTES_MAX = 255

_PUBLISHED = PublishOutcome(status=PublishStatus.PUBLISHED)
_UNROUTED = PublishOutcome(status=PublishStatus.UNROUTED, detail="no queue accepted the message")
_REFUSED = PublishOutcome(
    status=PublishStatus.REFUSED, detail="RabbitMQ refused the message: a queue is full (overflow) or has failed"
)
UNKNOWN = "it is not known whether RabbitMQ stored the message"

_FRAME = Struct(">BHI").pack
_CONTENT_HEADER = Struct(">BHIHHQ").pack
_END_AND_FRAME = Struct(">BBHI").pack
_METHOD, _HEADER, _BODY, _BASIC = 1, 2, 3, 60
_PUBLISH = b"\x00\x3c\x00\x28\x00\x00"
_MANDATORY = b"\x01"
_FRAME_END = b"\xce"
_FRAME_END_BYTE = 0xCE
_CONTENT_HEADER_BYTES = 12

_log = logging.getLogger(__name__)


class Batch:
    """The messages of one publish call, and their outcomes.

    Each message before index `sent` has been written or has an outcome. `done` completes when every message has an
    outcome.
    """

    __slots__ = ("_open", "done", "messages", "numbers", "outcomes", "sent")

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.messages = messages
        self.outcomes: list[PublishOutcome | None] = [None] * len(messages)
        self.sent = 0
        self.numbers: range = range(0)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = len(messages)

    def settle(self, index: int, outcome: PublishOutcome) -> None:
        """Record the outcome of the message at ``index``. If the message already has an outcome, do nothing."""
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
            self._open -= 1
            if not self._open and not self.done.done():
                self.done.set_result(None)

    def fail_open(self, why: str) -> None:
        """Fail every message without an outcome, because no more outcomes will arrive."""
        for index in range(len(self.messages)):
            detail = f"{UNKNOWN}: {why}" if index < self.sent else f"not sent: {why}"
            self.settle(index, PublishOutcome(status=PublishStatus.FAILED, detail=detail))


class Chunk:
    """Encoded messages of one batch that are written together.

    ``places`` are their indexes in the batch, ``sizes`` the sizes of their bodies and properties in bytes.
    """

    __slots__ = ("pieces", "places", "size", "sizes")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.sizes: list[int] = []
        self.pieces: list[bytes | memoryview] = []
        self.size = 0

    def add(self, place: int, frames: Iterable[bytes | memoryview], size: int) -> None:
        self.places.append(place)
        self.sizes.append(size)
        self.pieces += frames
        self.size += size


_Unconfirmed: TypeAlias = tuple[Batch, int, int]
"""A batch, the index of a message in it, and the size of the message."""
_Target: TypeAlias = tuple[TopicName | None, int, BrokerQueue | None, float]
"""The topic, the index, the queue and the delay of a message."""


class ConfirmChannel:
    """A publishing channel. It is the `ChannelHandler` that receives the broker's confirms.

    `closed` is the reason why the channel closed, or None while the channel is open. When the channel closes, all
    unconfirmed messages get the outcome FAILED.
    """

    def __init__(self, session: Session, amqp: AbstractChannel, options: RabbitOptions, keys: IdentityKeys) -> None:
        self.session = session
        self.closed: CloseReason | None = None
        self.refused = False
        """Whether RabbitMQ has refused a message on this channel; see `Publisher._renew`."""
        self._amqp = amqp
        self._number = amqp.number
        self._body_bytes_max = session.body_bytes_max
        self._count_max = options.unconfirmed_count_max
        self._bytes_max = options.unconfirmed_bytes_max
        self._next = 1
        self._lowest = 1
        """Confirms for many messages have settled every lower number."""
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._bytes = 0
        self._returned: set[str] = set()
        self._routes: dict[_Target, tuple[bytes, Signer]] = {}
        self._keys = keys
        self._signers: dict[BrokerQueue, Signer] = {}
        self._room: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ out

    def frames(self, outgoing: Outgoing) -> tuple[Sequence[bytes | memoryview], int]:
        """Return the frames that publish a message, and the size of its body and properties in bytes.

        Raises: ValueError if AMQP can't carry the message.
        """
        number, message = self._number, outgoing.message
        body = message.body
        publish_frame, sign = self._route(outgoing)
        properties = encode(message, sign(message.copy_id))
        size, header_size = len(body), _CONTENT_HEADER_BYTES + len(properties)
        if header_size > self._body_bytes_max:
            raise ValueError(
                f"the headers are {len(properties)} bytes; RabbitMQ accepts at most {self._body_bytes_max}"
            )
        header = _CONTENT_HEADER(_HEADER, number, header_size, _BASIC, 0, size)
        if 0 < size <= self._body_bytes_max:
            body_head = _END_AND_FRAME(_FRAME_END_BYTE, _BODY, number, size)
            return (publish_frame, header, properties, body_head, body, _FRAME_END), size + len(properties)
        frames: list[bytes | memoryview] = [publish_frame, header, properties, _FRAME_END]
        whole = memoryview(body)
        for start in range(0, size, self._body_bytes_max):
            part = whole[start : start + self._body_bytes_max]
            frames += (_FRAME(_BODY, number, len(part)), part, _FRAME_END)
        return frames, size + len(properties)

    def _route(self, outgoing: Outgoing) -> tuple[bytes, Signer]:
        """Return the Basic.Publish frame of a message, and the signer of its copy id.

        All messages with the same target and delay have the same frame.
        """
        target: _Target = (outgoing.topic, outgoing.index, outgoing.queue, outgoing.delay_seconds)
        route = self._routes.get(target)
        if route is None:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            route = self._routes[target] = (self._publish_frame(outgoing), self._signer(outgoing))
        return route

    def _publish_frame(self, outgoing: Outgoing) -> bytes:
        if outgoing.topic is not None and outgoing.delay_seconds > 0:
            seconds = whole_seconds(outgoing.delay_seconds)
            exchange = entrance_name(entry_level(seconds))
            routing_key = delay_key(seconds, outgoing.topic, outgoing.index)
        elif outgoing.topic is not None:
            exchange, routing_key = exchange_name(outgoing.topic), str(outgoing.index)
        else:
            exchange, routing_key = "", str(outgoing.queue or "")
        payload = _PUBLISH + _short_string(exchange) + _short_string(routing_key) + _MANDATORY
        return _FRAME(_METHOD, self._number, len(payload)) + payload + _FRAME_END

    def _signer(self, outgoing: Outgoing) -> Signer:
        """Return the signer for copies that have the same target as ``outgoing``."""
        target = outgoing.queue
        if target is None and outgoing.topic is not None:
            target = bound_queue(outgoing.topic, outgoing.index)
        assert target is not None, "a message has a topic or a queue"
        signer = self._signers.get(target)
        if signer is None:
            if len(self._signers) >= ROUTES_MAX:
                self._signers.clear()
            signer = self._signers[target] = self._keys.signer(target)
        return signer

    def fits(self, chunk: Chunk, size: int) -> bool:
        """Return whether a chunk and a further message of ``size`` bytes are no larger than the window."""
        return len(chunk.places) < self._count_max and chunk.size + size <= self._bytes_max

    def has_room(self, count: int, size: int) -> bool:
        """Return whether the window has room for ``count`` messages of ``size`` bytes together.

        An empty window accepts any messages.
        """
        waiting = len(self._unconfirmed) + count - 1
        return not self._unconfirmed or (waiting < self._count_max and self._bytes + size <= self._bytes_max)

    async def wait_for_room(self, count: int, size: int) -> None:
        """Wait until the window has room for ``count`` messages of ``size`` bytes, or until the channel closes.

        Only one caller may wait at a time.
        """
        while self.closed is None and not self.has_room(count, size):
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None

    async def retire(self, seconds: float) -> None:
        """Close the channel when all its messages are confirmed, or after ``seconds``.

        The caller must not publish on the channel any more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait_for_room(1, self._bytes_max + 1)  # only an empty window has room for this size
        self.session.interceptor.discard(self._number)
        await self.session.close_channel(self._amqp)

    def expect(self, batch: Batch, chunk: Chunk) -> None:
        """Number the messages that will be written next. The numbers of a batch have no gaps."""
        first, after = self._next, self._next + len(chunk.places)
        self._next = after
        batch.numbers = range(batch.numbers.start if batch.numbers else first, after)
        self._bytes += chunk.size
        messages = zip(repeat(batch), chunk.places, chunk.sizes, strict=False)
        self._unconfirmed.update(zip(range(first, after), messages, strict=True))

    def abandon(self, why: str) -> None:
        """Close the channel. Its unconfirmed messages get the outcome FAILED, because no confirms will arrive."""
        self.session.interceptor.discard(self._number)
        self.on_closed(CloseReason(0, why))

    def forget(self, batch: Batch) -> None:
        """Stop waiting for the confirms of a batch, so that its messages no longer occupy the window."""
        for number in batch.numbers:
            if (unconfirmed := self._unconfirmed.get(number)) is not None and unconfirmed[0] is batch:
                self._take(number)
        self._wake()

    # ------------------------------------------------------------ in: the ChannelHandler

    def on_confirms(self, confirms: list[Confirm]) -> None:
        for number, multiple, taken in confirms:
            if multiple:
                self._settle_through(number, taken)
                self._lowest = max(self._lowest, number + 1)
            else:
                self._settle(number, taken)
        self._wake()

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        returned = decode(properties, b"", None)
        if returned.problem:  # the error ends the channel, so that the confirm is not mistaken for a success
            raise ValueError(f"a returned message can't be read: {returned.problem}")
        if len(self._returned) >= RETURNED_MAX:  # the batches of these messages were given up long ago
            self._returned.clear()
        self._returned.add(returned.message.copy_id)

    def on_closed(self, reason: CloseReason) -> None:
        self.closed = reason
        self.session.spawn(self.session.close_channel(self._amqp), "popgate lost publishing channel")
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        for batch, index, _ in unconfirmed.values():
            detail = f"{UNKNOWN}: {reason.text}"
            batch.settle(index, PublishOutcome(status=PublishStatus.FAILED, detail=detail))
        self._wake()

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None:
        """Do nothing, because nothing is consumed on this channel."""

    def on_cancelled(self) -> None:
        """Do nothing, because nothing is consumed on this channel."""

    def _settle_through(self, number: int, taken: bool) -> None:
        numbers = range(self._lowest, number + 1)
        if not taken or self._returned:
            for each in numbers:
                self._settle(each, taken)
            return
        unconfirmed = self._unconfirmed
        for each in numbers:  # as in `_settle`, in which nearly all time would be spent for the calls
            found = unconfirmed.get(each)
            if found is not None:
                batch, index, size = found
                batch.settle(index, _PUBLISHED)
                del unconfirmed[each]
                self._bytes -= size

    def _settle(self, number: int, taken: bool) -> None:
        unconfirmed = self._unconfirmed.get(number)
        if unconfirmed is None:
            return
        batch, index, _ = unconfirmed
        self.refused |= not taken
        outcome = _PUBLISHED if taken else _REFUSED
        if self._returned:
            copy_id = batch.messages[index].message.copy_id
            if copy_id in self._returned:
                self._returned.discard(copy_id)
                outcome = _UNROUTED
        batch.settle(index, outcome)
        self._take(number)  # must be last: if an earlier step fails, ``on_closed`` still finds the message

    def _take(self, number: int) -> None:
        self._bytes -= self._unconfirmed.pop(number)[2]

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def _short_string(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > SHORT_STRING_BYTES_MAX:
        raise ValueError(f"{text[:40]!r}... is longer than {SHORT_STRING_BYTES_MAX} bytes")
    return bytes([len(encoded)]) + encoded
