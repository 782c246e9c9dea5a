"""Converts AMQP message properties to a `Message` and back.

This codec handles the metadata of one message, and does not use connections. It needs about 4 us for a message, and a
general codec needs about 30 us (measured). It is faster because it reads only what a `Message` contains.

Messages that popgate publishes carry `x-popgate-...` headers, which are removed when the message is read. Messages of
other publishers retain all their headers. Every type of AMQP header becomes a JSON-able value (``field_values``). Each
property without a field in `Message` becomes a header, such as `amqp-content-type`. If RabbitMQ permits every publisher
to set such a property, the header becomes a property again when popgate publishes the message. So a dead-lettered
message retains these properties, and a client that publishes with popgate can set them, too.

Any publisher can also write popgate's headers. If a value is one that popgate itself would not write (a time before
1970, a copy id of another form), popgate does not use the value, and shows it as a header such as
`amqp-x-popgate-published-at`. If the identity tag of a copy id is missing or wrong, the copy id was assigned to another
copy, for example to a dead letter that an operator moved by hand. The message is then read without a copy id.

RabbitMQ records the route of a delayed message in the message's headers (x-death and similar headers) and in its last
exchange. Readers don't need this route, so decoding omits it.

If a message of another publisher has no message_id, the `Message` has the message_id "". If it has no timestamp, the
`Message` has the publishing time 0.0. The engine replaces both values.
"""

from base64 import b64encode
from struct import Struct
from typing import NamedTuple

from popgate.adapters.rabbitmq.field_values import LONG_STRING, SIZED, as_text, field, read_value, short_string
from popgate.adapters.rabbitmq.usual_properties import (
    BEGINNING,
    COPY_ID_HEADER,
    DELIVERY_MODE,
    DOUBLE,
    HEADERS,
    IDENTITY_HEADER,
    MESSAGE_ID,
    PERSISTENT,
    PUBLISHED_AT_HEADER,
    USUAL_FLAGS,
    pack_beginning,
    read_usual,
)
from popgate.domain.identity import TagChecker
from popgate.domain.message import (
    HEADERS_BYTES_MAX,
    SHORT_STRING_BYTES_MAX,
    HeaderValue,
    Message,
    is_copy_id,
    is_time,
    seconds_of_timestamp,
)
from popgate.domain.names import TRANSIENT_PREFIX, CopyId
from popgate.domain.topics import MAX_DELIVERIES_MAX

ORDERING_KEY_HEADER = "x-popgate-ordering-key"
VISIBLE_AT_HEADER = "x-popgate-visible-at"
"""Present only on messages that were published with a delay."""
EXPIRES_AT_HEADER = "x-popgate-expires-at"
DELIVERY_COUNT_HEADER, ACQUIRED_COUNT_HEADER = "x-delivery-count", "x-acquired-count"
"""RabbitMQ's headers on quorum queues that count earlier deliveries of a message. ``versions.count_header`` returns the
header to read. The other header was set by a publisher, or counts something else."""
ESCAPED_HEADER_PREFIX = "x-popgate-header-"
"""Prefix that popgate puts before the name of a header that RabbitMQ would interpret. For example, RabbitMQ closes the
channel if the header CC is a string."""
PRIORITY_HEADER = "amqp-priority"
REPLY_TO_HEADER, TIMESTAMP_HEADER, MESSAGE_ID_HEADER = "amqp-reply-to", "amqp-timestamp", "amqp-message-id"
EXCHANGE_HEADER, ROUTING_KEY_HEADER = "amqp-exchange", "amqp-routing-key"
ODD_HEADER_PREFIX = "amqp-"
"""Prefix for the names of popgate's headers if popgate itself did not write their values."""
UNREADABLE_HEADER = "amqp-unreadable-properties"
"""Header that contains the base64 of a message's properties if they can't be read."""
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
"""A reply_to that popgate never sends. RabbitMQ closes the channel of a publisher that sends it, unless the publisher
consumes from this pseudo-queue."""

_TEXT_PROPERTIES = (
    # flag, header, whether any publisher may set it (RabbitMQ checks user_id, and expiration would drop dead letters)
    (0x8000, "amqp-content-type", True),
    (0x4000, "amqp-content-encoding", True),
    (0x0400, "amqp-correlation-id", True),
    (0x0200, REPLY_TO_HEADER, True),
    (0x0100, "amqp-expiration", False),
    (0x0020, "amqp-type", True),
    (0x0010, "amqp-user-id", False),
    (0x0008, "amqp-app-id", True),
)

_PRIORITY, _TIMESTAMP = 0x0800, 0x0040
_UNREADABLE_BYTES_MAX = HEADERS_BYTES_MAX * 3 // 4
"""Maximum number of bytes of unreadable properties that are retained, so that their base64 fits into
``HEADERS_BYTES_MAX``."""
_DEATHS = frozenset(
    {"x-death"} | {f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")}
)
"""The headers that RabbitMQ adds when it dead-letters a message."""
_ESCAPED = frozenset({"CC", "BCC", DELIVERY_COUNT_HEADER, ACQUIRED_COUNT_HEADER}) | _DEATHS
_OWN_PREFIX = b"x-popgate-"
_OWN_COPY_ID, _OWN_IDENTITY = COPY_ID_HEADER.encode(), IDENTITY_HEADER.encode()
_OWN_ORDERING_KEY, _OWN_PUBLISHED_AT = ORDERING_KEY_HEADER.encode(), PUBLISHED_AT_HEADER.encode()
_OWN_VISIBLE_AT, _OWN_EXPIRES_AT = VISIBLE_AT_HEADER.encode(), EXPIRES_AT_HEADER.encode()
_ESCAPED_PREFIX = ESCAPED_HEADER_PREFIX.encode()
_OWN_FIELDS = frozenset(
    {_OWN_COPY_ID, _OWN_IDENTITY, _OWN_ORDERING_KEY, _OWN_PUBLISHED_AT, _OWN_VISIBLE_AT, _OWN_EXPIRES_AT}
)
_OWN_NAMES = frozenset(name.decode() for name in _OWN_FIELDS)
_RAW_DEATHS = frozenset(name.encode() for name in _DEATHS)
_RAW_ESCAPED = frozenset(name.encode() for name in _ESCAPED)
_COUNTS = frozenset({DELIVERY_COUNT_HEADER.encode(), ACQUIRED_COUNT_HEADER.encode()})

_u32 = Struct(">I")


class Decoded(NamedTuple):
    """A decoded message.

    ``identified`` is True if the message has a copy id. ``delivery_count`` is the number of earlier deliveries, or None
    if RabbitMQ does not count them. ``problem`` describes what could not be read or was rejected. It is empty if there
    was no problem.
    """

    message: Message
    identified: bool
    delivery_count: int | None
    problem: str


# ---------------------------------------------------------------- decoding


def decode(
    properties: bytes,
    body: bytes,
    routing: bytes | None,
    *,
    check_tag: TagChecker | None = None,
    unique_message_ids: bool = False,
    notes: bool = False,
    count_header: bytes = DELIVERY_COUNT_HEADER.encode(),
) -> Decoded:
    """Return the message of one delivery. Never raises: unreadable properties become one header, and the body is kept.

    ``routing`` contains the exchange and the routing key, encoded as in the frame, or is None if the reader does not
    need them. ``check_tag`` checks the identity tag. It is None if this process published the message, because the copy
    id can then be trusted. If ``notes`` is True, headers of popgate that have no field in ``Message`` are retained.
    Dead letters have such headers. ``count_header`` is the header in which the broker counts deliveries.
    """
    if not routing and (usual := read_usual(properties, body)) is not None:
        why_not = "" if check_tag is None else check_tag(usual[0].copy_id, usual[1])
        if not why_not:
            return Decoded(usual[0], True, None, "")
    reading = _Reading(notes=notes, count_header=count_header)
    problem = ""
    try:
        reading.read(properties)
        if routing and reading.visible_at is None:
            reading.read_routing(routing)
    except Exception as error:  # the message must be delivered in spite of any error
        reading = _Reading(count_header=count_header)
        reading.headers[UNREADABLE_HEADER] = b64encode(properties[:_UNREADABLE_BYTES_MAX]).decode()
        problem = f"{type(error).__name__}: {error}"
    copy_id = reading.copy_id
    if check_tag is not None and copy_id and (why_not := check_tag(copy_id, reading.identity)):
        copy_id, problem = "", f"a copy id was rejected: {why_not}"
    if not copy_id and unique_message_ids and 0 < len(reading.message_id) <= SHORT_STRING_BYTES_MAX:
        copy_id = _publishers_copy_id(reading.message_id)
    message = Message(
        copy_id=CopyId(copy_id),
        message_id=reading.message_id,
        body=body,
        headers=reading.headers,
        ordering_key=reading.ordering_key,
        published_at=reading.published_at,
        visible_at=reading.visible_at,
        expires_at=reading.expires_at,
    )
    return Decoded(message, bool(copy_id), reading.delivery_count, problem)


def _publishers_copy_id(message_id: str) -> str:
    """Return the copy id that represents a publisher's unique message_id. popgate never generates this id itself."""
    if message_id.startswith(TRANSIENT_PREFIX):  # the engine would treat it as valid only until the channel ends
        return "%7E" + message_id[len(TRANSIENT_PREFIX) :]
    return "%" + message_id if is_copy_id(message_id) else message_id


class _Reading:
    __slots__ = (
        "copy_id",
        "count_header",
        "delivery_count",
        "expires_at",
        "headers",
        "identity",
        "message_id",
        "notes",
        "ordering_key",
        "published_at",
        "visible_at",
    )

    def __init__(self, *, notes: bool = False, count_header: bytes) -> None:
        self.notes = notes
        self.count_header = count_header
        self.copy_id = ""
        self.identity: str | None = None
        self.message_id = ""
        self.headers: dict[str, HeaderValue] = {}
        self.ordering_key: str | None = None
        self.published_at = 0.0
        self.visible_at: float | None = None
        self.expires_at: float | None = None
        self.delivery_count: int | None = None

    def read(self, raw: bytes) -> None:
        flags, position = raw[0] << 8 | raw[1], 2
        more = flags & 1
        while more:  # further words of flags, which no version of AMQP 0-9-1 uses
            more = raw[position + 1] & 1
            position += 2
        properties: dict[str, HeaderValue] = {}
        if flags & 0xC000:
            position = _read_texts(raw, position, flags, _TEXT_PROPERTIES[:2], properties)
        if flags & HEADERS:
            position = self._read_headers(raw, position)
        if flags & DELIVERY_MODE:
            position += 1
        if flags & _PRIORITY:
            properties[PRIORITY_HEADER] = raw[position]
            position += 1
        if flags & 0x0700:
            position = _read_texts(raw, position, flags, _TEXT_PROPERTIES[2:5], properties)
        if flags & MESSAGE_ID:
            end = position + 1 + raw[position]
            message_id = as_text(raw[position + 1 : end])
            position = end
            if len(message_id) <= SHORT_STRING_BYTES_MAX:
                self.message_id = message_id
            else:  # the base64 of bytes that are not UTF-8
                properties[MESSAGE_ID_HEADER] = message_id
        if flags & _TIMESTAMP:
            count = int.from_bytes(raw[position : position + 8], "big")
            position += 8
            seconds = seconds_of_timestamp(count)
            if seconds is None:
                properties[TIMESTAMP_HEADER] = str(count)
            elif not self.published_at:
                self.published_at = seconds
        if flags & 0x0038:
            position = _read_texts(raw, position, flags, _TEXT_PROPERTIES[5:], properties)
        if position > len(raw):
            raise ValueError("the properties are cut off")
        if properties:
            self.headers.update(properties)

    def read_routing(self, routing: bytes) -> None:
        exchange_end = 1 + routing[0]
        if exchange_end > 1:  # the default exchange routes by the queue's own name
            self.headers[EXCHANGE_HEADER] = as_text(routing[1:exchange_end])
            self.headers[ROUTING_KEY_HEADER] = as_text(routing[exchange_end + 1 :])

    def _read_headers(self, raw: bytes, position: int) -> int:
        length: int = _u32.unpack_from(raw, position)[0]
        end = position + 4 + length
        if end > len(raw):
            raise ValueError("the header table is cut off")
        position += 4
        if (own := BEGINNING.match(raw, position, end)) is not None and is_time(at := DOUBLE.unpack(own[3])[0]):
            self.copy_id, self.identity, self.published_at = own[1].decode(), own[2].decode(), at
            position = own.end()
        headers = self.headers
        deaths: list[tuple[bytes, int, int]] = []
        while position < end:
            name_end = position + 1 + raw[position]
            name = raw[position + 1 : name_end]
            kind = raw[name_end]
            if name in _RAW_DEATHS and kind in SIZED:  # these headers are long and seldom needed: skip them for now
                deaths.append((name, kind, name_end + 1))
                position = name_end + 5 + _u32.unpack_from(raw, name_end + 1)[0]
                continue
            if kind == LONG_STRING:
                start = name_end + 5
                position = start + _u32.unpack_from(raw, name_end + 1)[0]
                value: HeaderValue = as_text(raw[start:position])
            else:
                value, position = read_value(kind, raw, name_end + 1, end)
            if position > end:
                raise ValueError("a header is longer than its table")
            if name[:10] == _OWN_PREFIX:
                self._read_own(name, value)
            elif name in _COUNTS:
                if name == self.count_header and isinstance(value, int) and self.delivery_count is None:
                    self.delivery_count = min(value, MAX_DELIVERIES_MAX)  # RabbitMQ writes the first of equal names
            else:
                headers[as_text(name)] = value
        if self.visible_at is None:
            for name, kind, start in deaths:
                headers[as_text(name)] = read_value(kind, raw, start, end)[0]
        return end

    def _read_own(self, name: bytes, value: HeaderValue) -> None:
        if name == _OWN_COPY_ID and isinstance(value, str) and is_copy_id(value):
            self.copy_id = value
        elif name == _OWN_IDENTITY and isinstance(value, str):
            self.identity = value
        elif name == _OWN_PUBLISHED_AT and is_time(value):
            self.published_at = value
        elif name == _OWN_ORDERING_KEY and isinstance(value, str) and len(value.encode()) <= SHORT_STRING_BYTES_MAX:
            self.ordering_key = value
        elif name == _OWN_VISIBLE_AT and is_time(value):
            self.visible_at = value
        elif name == _OWN_EXPIRES_AT and is_time(value):
            self.expires_at = value
        elif name.startswith(_ESCAPED_PREFIX) and name[len(_ESCAPED_PREFIX) :] in _RAW_ESCAPED:
            self.headers[name[len(_ESCAPED_PREFIX) :].decode()] = value
        elif name in _OWN_FIELDS or name.startswith(_ESCAPED_PREFIX):
            self.headers[ODD_HEADER_PREFIX + as_text(name)] = value
        elif self.notes:
            self.headers[as_text(name)] = value


def _read_texts(
    raw: bytes,
    position: int,
    flags: int,
    properties: tuple[tuple[int, str, bool], ...],
    into: dict[str, HeaderValue],
) -> int:
    for flag, header, _ in properties:
        if flags & flag:
            end = position + 1 + raw[position]
            into[header] = as_text(raw[position + 1 : end])
            position = end
    return position


# ---------------------------------------------------------------- encoding


def encode(message: Message, identity: str) -> bytes:
    """Return the property flags and the properties of `message`, encoded as in a content header frame.

    `identity` is the identity tag of the message's copy id.

    Raises: ValueError, which names the header or field that AMQP can't carry.
    """
    table = [pack_beginning(message.copy_id.encode(), identity.encode(), message.published_at)]
    if message.ordering_key is not None:
        key = message.ordering_key.encode()
        table += (_ORDERING_KEY_FIELD, _u32.pack(len(key)), key)
    if message.visible_at is not None:
        table += (_VISIBLE_AT_FIELD, DOUBLE.pack(message.visible_at))
    if message.expires_at is not None:
        table += (_EXPIRES_AT_FIELD, DOUBLE.pack(message.expires_at))
    if not message.headers and message.message_id:
        headers = b"".join(table)
        return b"".join((USUAL_FLAGS, _u32.pack(len(headers)), headers, PERSISTENT, short_string(message.message_id)))
    properties: dict[int, bytes] = {}
    for name, value in message.headers.items():
        if name.startswith("amqp-") and _as_property(name, value, properties):
            continue
        if name in _OWN_NAMES:
            raise ValueError(f"header {name!r} is popgate's own")  # readers use the last header of a name
        table += (short_string(ESCAPED_HEADER_PREFIX + name if name in _ESCAPED else name), field(name, value))
    headers = b"".join(table)
    properties[HEADERS] = _u32.pack(len(headers)) + headers
    properties[DELIVERY_MODE] = PERSISTENT
    if message.message_id:
        properties[MESSAGE_ID] = short_string(message.message_id)
    flags = 0
    for flag in properties:
        flags |= flag
    return flags.to_bytes(2, "big") + b"".join([properties[flag] for flag in sorted(properties, reverse=True)])


def _as_property(name: str, value: HeaderValue, properties: dict[int, bytes]) -> bool:
    if name == PRIORITY_HEADER and isinstance(value, int) and 0 <= value <= 255:
        properties[_PRIORITY] = bytes([value])
        return True
    flag = _SETTABLE.get(name)
    if (
        flag is None
        or value == DIRECT_REPLY_TO
        or not isinstance(value, str)
        or len(encoded := value.encode()) > SHORT_STRING_BYTES_MAX
    ):
        return False
    properties[flag] = bytes([len(encoded)]) + encoded
    return True


_SETTABLE = {header: flag for flag, header, settable in _TEXT_PROPERTIES if settable}
_VISIBLE_AT_FIELD = short_string(VISIBLE_AT_HEADER) + b"d"
_EXPIRES_AT_FIELD = short_string(EXPIRES_AT_HEADER) + b"d"
_ORDERING_KEY_FIELD = short_string(ORDERING_KEY_HEADER) + b"S"
