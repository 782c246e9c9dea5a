"""Makes every delivery readable for aiormq, which gives up the whole connection if it can't decode one frame.

Owns the bytes between the connection and aiormq. Any publisher can write properties that pamqp can't decode: a
timestamp in nanoseconds, text that is not UTF-8, deeply nested headers. Such a property is left out, and the header
``amqp-unreadable-properties`` shows all properties of the message in base64, as the proxies show them.
"""

import asyncio
import contextlib
from base64 import b64encode
from struct import Struct
from typing import Any, cast

import pamqp.frame
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from pamqp import decode
from pamqp.commands import Basic
from pamqp.constants import FRAME_BODY, FRAME_HEADER, FRAME_HEARTBEAT, FRAME_METHOD
from pamqp.header import ContentHeader
from yarl import URL

UNREADABLE_HEADER = "amqp-unreadable-properties"
UNREADABLE_BYTES_MAX = 48 * 1024
"""Maximum bytes of unreadable properties that the header shows."""
NESTING_MAX = 32
"""Maximum nesting of headers: code that reads or sends a message is recursive, and would fail on deeper ones."""

_frame = Struct(">BHI")
_u32 = Struct(">I")
_PROPERTIES_AT = _frame.size + 12
_DELIVER = b"\x00\x3c\x00\x3c"
_FLAGS: dict[str, int] = Basic.Properties.flags


class ReadableFrames(asyncio.StreamReader):
    """Reads the frames of `source`, and replaces those that pamqp can't decode."""

    def __init__(self, source: asyncio.StreamReader) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._source = source
        self._unread = b""

    def at_eof(self) -> bool:
        return not self._unread and self._source.at_eof()

    async def readexactly(self, n: int) -> bytes:
        if not self._unread:
            self._unread = await self._next_frame()
        taken, self._unread = self._unread[:n], self._unread[n:]
        return taken

    async def _next_frame(self) -> bytes:
        head = await self._source.readexactly(_frame.size)
        kind, _, length = _frame.unpack(head)
        if kind not in (FRAME_METHOD, FRAME_HEADER, FRAME_BODY, FRAME_HEARTBEAT):
            return head  # aiormq gives up the connection because of it
        return readable(head + await self._source.readexactly(length + 1))


class ReadableTransport(TransportFactory):
    """Connects as aiormq does by itself, and reads through `ReadableFrames`."""

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, writer = await factory.create(url, **kwargs)
        return ReadableFrames(reader), writer


def readable(frame: bytes) -> bytes:
    """Return the whole frame so that pamqp can decode it: unchanged if it can already."""
    kind, channel, _ = _frame.unpack_from(frame)
    is_delivery = kind == FRAME_METHOD and frame.startswith(_DELIVER, _frame.size)
    if kind != FRAME_HEADER and not is_delivery:
        return frame
    try:
        content = pamqp.frame.unmarshal(frame)[2]
        if not isinstance(content, ContentHeader) or _is_shallow(content.properties.headers, NESTING_MAX):
            return frame
    except Exception:  # pamqp raises errors of its own, ValueError, OverflowError, RecursionError and more
        pass
    payload = _with_ascii_route(frame[_frame.size : -1]) if is_delivery else _with_readable_properties(frame)
    return _frame.pack(kind, channel, len(payload)) + payload + frame[-1:]


def _with_ascii_route(method: bytes) -> bytes:
    """Return a Basic.Deliver in which every byte of exchange and routing key that is not ASCII is a question mark."""
    exchange_at = 4 + 1 + method[4] + 9
    key_at = exchange_at + 1 + method[exchange_at]
    exchange, key = (
        part.decode("ascii", "replace").encode("ascii", "replace")
        for part in (method[exchange_at + 1 : key_at], method[key_at + 1 :])
    )
    return method[: exchange_at + 1] + exchange + method[key_at : key_at + 1] + key


def _with_readable_properties(frame: bytes) -> bytes:
    raw = frame[_PROPERTIES_AT:-1]
    note = UNREADABLE_HEADER.encode()
    shown = b64encode(raw[:UNREADABLE_BYTES_MAX])
    found = _readable_properties(raw)
    table = bytes([len(note)]) + note + b"S" + _u32.pack(len(shown)) + shown + found.get("headers", b"")[4:]
    found["headers"] = _u32.pack(len(table)) + table
    flags = sum(_FLAGS[name] for name in found)
    ordered = [found[name] for name in Basic.Properties.attributes() if name in found]
    return frame[_frame.size : _PROPERTIES_AT] + flags.to_bytes(2, "big") + b"".join(ordered)


def _readable_properties(raw: bytes) -> dict[str, bytes]:
    """Return the bytes of each property that pamqp can decode."""
    flags, position = int.from_bytes(raw[:2], "big"), 2
    found: dict[str, bytes] = {}
    for name in Basic.Properties.attributes():
        if not flags & _FLAGS[name]:
            continue
        kind = Basic.Properties.amqp_type(name)
        with contextlib.suppress(Exception):  # see `readable`
            size = _size(kind, raw, position)
            property_bytes, position = raw[position : position + size], position + size
            value = decode.by_type(property_bytes, kind)[1]
            if len(property_bytes) == size and _is_shallow(value, NESTING_MAX):
                found[name] = property_bytes
    return found


def _size(kind: str, raw: bytes, position: int) -> int:
    match kind:
        case "shortstr":
            return 1 + raw[position]
        case "table":
            return 4 + int(_u32.unpack_from(raw, position)[0])
        case "timestamp":
            return 8
        case _:
            return 1


def _is_shallow(value: object, levels: int) -> bool:
    inner: list[object] = []
    if isinstance(value, dict):
        inner = [*cast("dict[str, object]", value).values()]
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    return not inner or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inner))
