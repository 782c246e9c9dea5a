"""Chooses the formats of a request and its answer, JSON or MessagePack, and reads requests in either format.

Any content type that is not MessagePack is read as JSON, so that a plain ``curl -d`` works. An answer is written in the
format of its request, unless ``accept`` prefers the other format.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import DecodeError, Struct

from popgate.api.complaints import QUOTED_LENGTH_MAX, complaint
from popgate.api.problems import UnsupportedMediaType
from popgate.domain.errors import InvalidRequest

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
"""A content type in which only the messages of a lease group can be returned."""
MSGPACK_TYPES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
REMEMBERED_MAX = 512
STRUCTURE_BYTES_MAX = 1 << 20
"""Maximum number of bytes outside of the strings of a JSON body, with the space between them."""
STRINGS_MAX = 200_000
"""Maximum number of strings in a JSON body that is larger than ``STRUCTURE_BYTES_MAX``."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""Also matches a string that does not end, so that the time of a search grows linearly."""

RequestT = TypeVar("RequestT", bound=Struct)


class Format(NamedTuple):
    """The format of one request, and the format of its answer.

    ``packed``: the request is in MessagePack. ``answer_packed``: the answer must be in MessagePack. ``wants_arrow``:
    the client prefers Arrow to JSON and MessagePack. This applies only to answers that can be written as Arrow.
    """

    packed: bool
    answer_packed: bool
    content_type: tuple[bytes, bytes]
    encode: Callable[[Any], bytes]
    wants_arrow: bool


def as_text(value: Any) -> str:
    """Convert a header value to text if neither JSON nor MessagePack can express it. Such values come from AMQP
    publishers."""
    return str(value)


_JSON_ANSWER = ((b"content-type", JSON.encode()), msgspec.json.Encoder(enc_hook=as_text).encode)
_PACKED_ANSWER = ((b"content-type", MSGPACK.encode()), msgspec.msgpack.Encoder(enc_hook=as_text).encode)
_remembered: dict[tuple[bytes, bytes], Format] = {}


def negotiate(headers: Mapping[bytes, bytes]) -> Format:
    """Return the formats of a request with these headers, and of its answer. Raises: UnsupportedMediaType for a
    compressed body."""
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise UnsupportedMediaType("popgate reads only uncompressed bodies; omit content-encoding")
    key = (headers.get(b"content-type", b""), headers.get(b"accept", b""))
    known = _remembered.get(key)
    if known is None:
        packed = media_type(key[0]) in MSGPACK_TYPES
        quality = _quality(key[1])
        answer_packed = packed if quality[JSON] == quality[MSGPACK] else quality[MSGPACK] > quality[JSON]
        wants_arrow = quality[ARROW] > max(quality[JSON], quality[MSGPACK])
        known = Format(packed, answer_packed, *(_PACKED_ANSWER if answer_packed else _JSON_ANSWER), wants_arrow)
        if len(_remembered) < REMEMBERED_MAX:
            _remembered[key] = known
    return known


def media_type(header: bytes) -> str:
    return header.decode("latin-1").partition(";")[0].strip().lower()


def _quality(accept: bytes) -> Mapping[str, float]:
    """Return the weight (``q``) that the ``accept`` header gives to each format. The weight of a format that the header
    does not name is 0."""
    quality = {JSON: 0.0, MSGPACK: 0.0, ARROW: 0.0}
    for part in accept.decode("latin-1").lower().split(","):
        name, *parameters = [piece.strip() for piece in part.split(";")]
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        offered = MSGPACK if name in MSGPACK_TYPES else name
        if offered in quality:
            quality[offered] = max(quality[offered], weight)
    return quality


class Reader(Generic[RequestT]):
    """Decodes requests of one type. If a field occurs twice, the last value is used, as in most JSON decoders."""

    def __init__(self, request_type: type[RequestT], packed_type: type[RequestT] | None = None) -> None:
        """``packed_type`` is the type of requests in MessagePack, if it differs."""
        self._type = request_type
        self._from_json = msgspec.json.Decoder(request_type).decode
        self._from_msgpack = msgspec.msgpack.Decoder(packed_type or request_type).decode

    def read(self, body: bytes, packed: bool) -> RequestT:
        """Return the decoded request. Raises: InvalidRequest, which names the wrong field."""
        if len(body) > STRUCTURE_BYTES_MAX and not packed:
            _check_structure(body)
        try:
            return self._from_msgpack(body) if packed else self._from_json(body)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise complaint(error, self._type, body, packed=packed) from error


def _check_structure(body: bytes) -> None:
    """Refuse JSON that becomes far larger in memory than it is, before it is decoded. Valid requests are large only
    because of long strings. Raises: InvalidRequest."""
    outside = end = 0
    for count, string in enumerate(_STRING.finditer(body)):
        outside += string.start() - end
        end = string.end()
        if count >= STRINGS_MAX or outside > STRUCTURE_BYTES_MAX:
            break
    else:
        outside += len(body) - end
        if outside <= STRUCTURE_BYTES_MAX:
            return
    raise InvalidRequest(
        f"the body has more than {STRINGS_MAX} strings, or more than {STRUCTURE_BYTES_MAX >> 20} MiB outside of "
        "its strings; send less at a time",
        field="",
    )


def check_json(body: bytes) -> None:
    """Refuse JSON that FastAPI's decoder would wrongly accept or misunderstand. Raises: InvalidRequest.

    FastAPI's decoder guesses the encoding, although RFC 8259 allows only UTF-8. It accepts NaN, and uses the last value
    of a repeated name. It rejects all other invalid JSON itself.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:QUOTED_LENGTH_MAX]
                raise InvalidRequest(f"{shown} occurs twice in one object", field=shown)
            seen.add(name)

    def refuse(constant: str) -> None:
        raise InvalidRequest(f"the body is not valid JSON ({constant} is not a JSON number)", field="")

    if json.detect_encoding(body) != "utf-8":
        raise InvalidRequest("the body is not valid JSON: it must be in UTF-8, without a byte order mark", field="")
    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=check, parse_constant=refuse)
