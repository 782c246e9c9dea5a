"""Reads what popgate writes to each message with one regular expression, because reading it field by field takes much
longer.

popgate begins the headers of each message with the same three fields. Most messages have no other headers.
``BEGINNING`` matches the three fields, and ``read_usual`` reads the properties of a message without other headers. If
these fields have another order, length or type, ``properties`` reads them.
"""

import re
from functools import lru_cache
from struct import Struct

from popgate.adapters.rabbitmq.field_values import short_string
from popgate.domain.identity import TAG_LENGTH
from popgate.domain.message import COPY_ID_DIGITS, Message, is_time
from popgate.domain.names import CopyId

COPY_ID_HEADER = "x-popgate-copy-id"
IDENTITY_HEADER = "x-popgate-identity"
"""The identity tag of the copy id (``domain.identity``)."""
PUBLISHED_AT_HEADER = "x-popgate-published-at"

HEADERS, DELIVERY_MODE, MESSAGE_ID = 0x2000, 0x1000, 0x0080
"""The flags of the properties that popgate writes to each message."""
USUAL_FLAGS = (HEADERS | DELIVERY_MODE | MESSAGE_ID).to_bytes(2, "big")
PERSISTENT = b"\x02"
COPY_ID_FIELD, IDENTITY_FIELD = short_string(COPY_ID_HEADER) + b"S", short_string(IDENTITY_HEADER) + b"S"
PUBLISHED_AT_FIELD = short_string(PUBLISHED_AT_HEADER) + b"d"
"""The name and the type of a field. The length of a text follows, then its value."""
DOUBLE = Struct(">d")
_LENGTH = Struct(">I")

_FIELDS = (
    re.escape(COPY_ID_FIELD + _LENGTH.pack(COPY_ID_DIGITS))
    + rb"([0-9a-f]{%d})" % COPY_ID_DIGITS
    + re.escape(IDENTITY_FIELD + _LENGTH.pack(TAG_LENGTH))
    + rb"([ -~]{%d})" % TAG_LENGTH
    + re.escape(PUBLISHED_AT_FIELD)
    + rb"(.{8})"
)
_FIELDS_BYTES = sum(
    map(len, (COPY_ID_FIELD, IDENTITY_FIELD, PUBLISHED_AT_FIELD)),
    2 * _LENGTH.size + COPY_ID_DIGITS + TAG_LENGTH + DOUBLE.size,
)
BEGINNING = re.compile(_FIELDS, re.DOTALL)
"""Matches the fields with which popgate begins the headers of each message. Groups: copy id, identity tag, time of
publishing."""
_USUAL = re.compile(
    re.escape(USUAL_FLAGS + _LENGTH.pack(_FIELDS_BYTES)) + _FIELDS + re.escape(PERSISTENT) + rb"(.)",
    re.DOTALL,
)
"""Matches the properties of a message with these headers only, up to the length of its message_id."""


@lru_cache
def _beginning(copy_id_bytes: int, tag_bytes: int) -> Struct:
    fields = ((COPY_ID_FIELD, f"I{copy_id_bytes}s"), (IDENTITY_FIELD, f"I{tag_bytes}s"), (PUBLISHED_AT_FIELD, "d"))
    return Struct(">" + "".join(f"{len(name)}s{value}" for name, value in fields))


def pack_beginning(copy_id: bytes, tag: bytes, published_at: float) -> bytes:
    """Return the fields with which the headers of a message begin."""
    id_length, tag_length = len(copy_id), len(tag)
    return _beginning(id_length, tag_length).pack(
        *(COPY_ID_FIELD, id_length, copy_id),
        *(IDENTITY_FIELD, tag_length, tag),
        *(PUBLISHED_AT_FIELD, published_at),
    )


def read_usual(properties: bytes, body: bytes) -> tuple[Message, str] | None:
    """Return the message and its identity tag. Return None if it has other properties than those of each message."""
    found = _USUAL.match(properties)
    if found is None or found.end() + found[4][0] != len(properties):
        return None
    published_at, message_id = DOUBLE.unpack(found[3])[0], properties[found.end() :]
    if not is_time(published_at) or not message_id.isascii():
        return None
    return Message(CopyId(found[1].decode()), message_id.decode(), body, {}, None, published_at), found[2].decode()
