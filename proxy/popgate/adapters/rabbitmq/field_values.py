"""Converts AMQP field values to header values and back, for all types that a header table may contain.

Decoding accepts any field that a publisher wrote. Every type becomes a JSON-able value: bytes become text if they are
UTF-8, otherwise base64; timestamps become ISO 8601; decimals become text; NaN and infinities become null. Tables and
arrays that are nested deeper than ``HEADER_NESTING_MAX`` become the base64 of their bytes. The components that process
a message later (encoders, filters, clients) are recursive, and would fail on deeper tables and arrays.

The types are those of RabbitMQ and its clients, which differ from the specification:
https://www.rabbitmq.com/docs/amqp-0-9-1-errata (section 3)
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from math import isfinite
from struct import Struct
from typing import cast

from popgate.domain.message import HEADER_NESTING_MAX, SHORT_STRING_BYTES_MAX, HeaderValue, seconds_of_timestamp

LONG_STRING = 0x53
SIZED = b"SA"
"""The field types of x-death headers whose bytes are preceded by their length: long string and array."""

_u32 = Struct(">I")
_i64 = Struct(">q")
_double = Struct(">d")
_scaled = Struct(">Bi")


# ---------------------------------------------------------------- decoding


def read_value(kind: int, raw: bytes, position: int, end: int, depth: int = 1) -> tuple[HeaderValue, int]:
    """Return the JSON-able value of the field at ``position``, and the position of its end.

    ``end`` is the end of the enclosing table or array. ``depth`` is the number of tables and arrays around the field.

    Raises: ValueError, IndexError or struct.error if the bytes are not a field.
    """
    number = _NUMBERS.get(kind)
    if number is not None:
        value = number.unpack_from(raw, position)[0]
        if isinstance(value, float) and not isfinite(value):
            value = None
        return value, position + number.size
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(raw, position)
    nested = _NESTED.get(kind)
    if nested is None:
        raise ValueError(f"unknown header type {chr(kind)!r}")
    own_end = position + 4 + _u32.unpack_from(raw, position)[0]
    if own_end > end:  # otherwise the bytes behind it would be read again at each level
        raise ValueError("a header is longer than its table")
    if depth > HEADER_NESTING_MAX:
        return b64encode(raw[position + 4 : own_end]).decode(), own_end
    return nested(raw, position + 4, own_end, depth + 1), own_end


def as_text(raw: bytes) -> str:
    """Return ``raw`` as text, or as base64 if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return b64encode(raw).decode()


def _read_bytes(raw: bytes, position: int) -> tuple[HeaderValue, int]:
    end = position + 4 + _u32.unpack_from(raw, position)[0]
    return as_text(raw[position + 4 : end]), end


def _read_decimal(raw: bytes, position: int) -> tuple[HeaderValue, int]:
    scale, digits = _scaled.unpack_from(raw, position)
    return str(Decimal(digits).scaleb(-scale)), position + _scaled.size


def _read_timestamp(raw: bytes, position: int) -> tuple[HeaderValue, int]:
    seconds = seconds_of_timestamp(int.from_bytes(raw[position : position + 8], "big"))
    moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    return moment, position + 8


def _read_array(raw: bytes, position: int, end: int, depth: int) -> HeaderValue:
    values: list[HeaderValue] = []
    while position < end:
        value, position = read_value(raw[position], raw, position + 1, end, depth)
        values.append(value)
    return values


def _read_table(raw: bytes, position: int, end: int, depth: int) -> HeaderValue:
    table: dict[str, HeaderValue] = {}
    while position < end:
        name_end = position + 1 + raw[position]
        name = as_text(raw[position + 1 : name_end])
        table[name], position = read_value(raw[name_end], raw, name_end + 1, end, depth)
    return table


_NUMBERS: Mapping[int, Struct] = {
    ord(kind): Struct(">" + code) for kind, code in zip("tbBsuIilLfd", "?bBhHiIqqfd", strict=True)
}
_READERS: Mapping[int, Callable[[bytes, int], tuple[HeaderValue, int]]] = {
    ord("S"): _read_bytes,
    ord("x"): _read_bytes,
    ord("D"): _read_decimal,
    ord("T"): _read_timestamp,
    ord("V"): lambda _, position: (None, position),
    0: lambda _, position: (None, position),
}
_NESTED: Mapping[int, Callable[[bytes, int, int, int], HeaderValue]] = {ord("A"): _read_array, ord("F"): _read_table}


# ---------------------------------------------------------------- encoding


def field(name: str, value: HeaderValue) -> bytes:
    """Return the type and the bytes of a header's value. Raises: ValueError with ``name``, if AMQP can't carry it."""
    return _field(name, value, 1)


def short_string(text: str) -> bytes:
    """Return ``text`` as an AMQP short string: its length and its bytes. Raises: ValueError if ``text`` is too long."""
    encoded = text.encode()
    if len(encoded) > SHORT_STRING_BYTES_MAX:
        raise ValueError(f"{text[:40]!r}... is longer than {SHORT_STRING_BYTES_MAX} bytes")
    return bytes([len(encoded)]) + encoded


def _field(name: str, value: HeaderValue, depth: int) -> bytes:
    if isinstance(value, str):
        encoded = value.encode()
        return b"S" + _u32.pack(len(encoded)) + encoded
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"header {name!r} does not fit into 64 bits")
        return b"l" + _i64.pack(value)
    if isinstance(value, float):
        return b"d" + _double.pack(value)
    if value is None:
        return b"V"
    if not isinstance(value, list | tuple | Mapping):
        raise ValueError(f"header {name!r} has a value of type {type(value).__name__}, which AMQP can't carry")
    if depth > HEADER_NESTING_MAX:
        raise ValueError(f"header {name!r} is nested more than {HEADER_NESTING_MAX} deep")
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, HeaderValue]", value).items()
        fields = b"".join([short_string(key) + _field(name, item, depth + 1) for key, item in entries])
        return b"F" + _u32.pack(len(fields)) + fields
    items = b"".join([_field(name, item, depth + 1) for item in cast("list[HeaderValue]", value)])
    return b"A" + _u32.pack(len(items)) + items
