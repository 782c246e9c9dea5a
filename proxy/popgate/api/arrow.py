"""Encodes the messages of lease groups as Arrow IPC streams (``accept: application/vnd.apache.arrow.stream``).

This module defines the schema and builds the columns. nanoarrow, of the Apache Arrow project, encodes them. pyarrow
could also encode them, but is fifty times as large. A stream consists of the schema, a record batch for each part of a
slice, and the end-of-stream marker. An interrupted stream has no marker, so every reader notices the interruption.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import nanoarrow as nanoarrow_package  # type: ignore[import-untyped]  # it has no stubs
from nanoarrow.ipc import StreamWriter as UntypedWriter  # type: ignore[import-untyped]  # it has no stubs

from popgate.api.message_encoder import Failed, MessageEncoder
from popgate.engine.lease_groups.slices import GroupMessage

_MICROSECONDS = 1_000_000
nanoarrow: Any = nanoarrow_package
StreamWriter: Any = UntypedWriter
CArray: TypeAlias = Any

_INSTANT = nanoarrow.timestamp("us", timezone="UTC")
_FIELDS = {
    "position": nanoarrow.int64(nullable=False),
    "message_id": nanoarrow.string(),
    "body": nanoarrow.binary(nullable=False),
    "headers": nanoarrow.string(nullable=False),
    "ordering_key": nanoarrow.string(),
    "queue": nanoarrow.int32(nullable=False),
    "delivery_count": nanoarrow.int32(nullable=False),
    "published_at": _INSTANT,
    "first_delivered_at": nanoarrow.timestamp("us", timezone="UTC", nullable=False),
}
SCHEMA = nanoarrow.struct(_FIELDS, nullable=False)


class ArrowEncoder:
    """Encodes the messages of one slice of a lease group as an Arrow stream, part by part.

    ``as_text`` converts header values that JSON can't express to text. ``failed`` is called for messages that can't be
    encoded.
    """

    def __init__(self, as_text: Callable[[object], object], failed: Failed) -> None:
        self._message_encoder = MessageEncoder(lambda one: one, lambda one: repr(self._columns([one])).encode(), failed)
        self._written = bytearray()
        self._writer = StreamWriter.from_writable(self)
        self._encode = msgspec.json.Encoder(enc_hook=as_text).encode
        self._has_begun = False

    def write(self, data: bytes) -> int:
        """Append ``data`` to the bytes that ``part`` or ``end`` returns next. nanoarrow's stream writer calls this
        method."""
        self._written += data
        return len(data)

    def part(self, messages: Sequence[GroupMessage]) -> bytes:
        """Return ``messages`` encoded as one record batch. The schema precedes the first batch."""
        self._has_begun = True
        try:
            columns = self._columns(messages)
        except Exception:
            columns = self._columns([self._message_encoder.readable(one) for one in messages])
        self._writer.write_stream(nanoarrow.c_array_from_buffers(SCHEMA, len(messages), [None], children=columns))
        return self._take()

    def end(self) -> bytes:
        """Return the last bytes of the stream, with the end-of-stream marker. A stream without messages contains one
        record batch without rows."""
        start = b"" if self._has_begun else self.part([])
        self._writer.close()
        return start + self._take()

    def _take(self) -> bytes:
        written = bytes(self._written)
        self._written.clear()
        return written

    def _columns(self, messages: Sequence[GroupMessage]) -> list[CArray]:
        bare = [one.message for one in messages]
        return [
            _numbers("position", "q", [one.position for one in messages]),
            _texts("message_id", [one.message_id.encode() if one.message_id else None for one in bare]),
            _texts("body", [one.body for one in bare]),
            _texts("headers", [self._encode(one.headers) for one in bare]),
            _texts("ordering_key", [None if one.ordering_key is None else one.ordering_key.encode() for one in bare]),
            _numbers("queue", "i", [one.queue for one in messages]),
            _numbers("delivery_count", "i", [one.delivery_count for one in messages]),
            _numbers("published_at", "q", [_instant(one.published_at) if one.published_at else None for one in bare]),
            _numbers("first_delivered_at", "q", [_instant(one.first_delivered_at) for one in messages]),
        ]


def _instant(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def _numbers(field: str, kind: str, values: Sequence[int | None]) -> CArray:
    filled = array(kind, (value or 0 for value in values))
    return nanoarrow.c_array_from_buffers(_FIELDS[field], len(values), [_validity(values), filled])


def _texts(field: str, values: Sequence[bytes | None]) -> CArray:
    offsets = array("i", [0])
    end = 0
    for value in values:
        end += len(value or b"")
        offsets.append(end)
    data = b"".join(value or b"" for value in values)
    return nanoarrow.c_array_from_buffers(_FIELDS[field], len(values), [_validity(values), offsets, data])


def _validity(values: Iterable[object]) -> bytes | None:
    """Return Arrow's validity bitmap of ``values``: one bit per value, which is 0 for None. The lowest bit stands for
    the first value. Return None if no value is None."""
    bits = 0
    length = 0
    for value in values:
        bits |= (value is not None) << length
        length += 1
    return None if bits == (1 << length) - 1 else bits.to_bytes((length + 7) // 8, "little")
