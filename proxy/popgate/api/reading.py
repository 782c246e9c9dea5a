"""Converts the bytes of a data plane request to the engine's types, and checks all untrusted input once.

Objects of the class ``Reader`` check field names, types and limits. The functions of this module check the rules that a
type can't express.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from msgspec import UNSET, Raw, ValidationError, msgpack

from popgate.api.answers import json_bytes, packed_bytes
from popgate.api.complaints import QUOTED_LENGTH_MAX
from popgate.api.formats import Reader
from popgate.api.requests import (
    AckRequest,
    ExtendEntry,
    ExtendRequest,
    PackedEntry,
    PackedPublishRequest,
    PopRequestBody,
    PublishEntry,
    PublishRequest,
    RejectEntry,
    RejectRequest,
    ReleaseEntry,
    ReleaseRequest,
)
from popgate.domain.attempts import Cause
from popgate.domain.errors import InvalidRequest, MessageTooLarge
from popgate.domain.filters import FilterValue, HeaderFilter, header_filter
from popgate.domain.message import (
    MESSAGE_BYTES_MAX,
    RESERVED_HEADER_PREFIX,
    SHORT_STRING_BYTES_MAX,
    HeaderValue,
)
from popgate.domain.names import client_name
from popgate.domain.quotas import Quotas, flag_of
from popgate.engine.lease.pop_request import PopRequest
from popgate.engine.lease.selection import ANY, FilteredSelection
from popgate.engine.publish.publishing import NewMessage
from popgate.engine.settle.orders import SettleOrder, Verb

_NO_HEADERS: Mapping[str, HeaderValue] = {}
_BASE64_LENGTH_MAX = (MESSAGE_BYTES_MAX + 2) // 3 * 4
_NUMBER_BYTES = 8
_HEADER_VALUES = "the value must be a string, a number, true, false or null"
_packed_value = msgpack.Decoder(FilterValue).decode
_packed_text, _packed_bytes = msgpack.Decoder(str).decode, msgpack.Decoder(bytes).decode
_INTEGER_LIMIT = 2**63


# -- publish ----------------------------------------------------------------------------------------------------------


def new_messages(request: PublishRequest, quotas: Quotas) -> list[NewMessage]:
    """Return the messages of a publish request. Raises: InvalidRequest, MessageTooLarge. If one message is invalid, no
    message is published."""
    return [_new_message(entry, place, quotas) for place, entry in enumerate(request.messages)]


def _new_message(entry: PublishEntry, place: int, quotas: Quotas) -> NewMessage:
    body = entry.body
    if entry.body_base64 is not UNSET or not isinstance(body, (str, bytes)):
        body = _unusual_body(entry, place)
    elif isinstance(body, str):
        body = body.encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise _too_large(place)
    message_id = entry.message_id or None
    ordering_key = entry.ordering_key or None
    if message_id is not None:
        _check_short(message_id, place, "message_id")
    if ordering_key is not None:
        _check_short(ordering_key, place, "ordering_key")
    headers = entry.headers or _NO_HEADERS
    if headers and isinstance(entry, PackedEntry):
        headers = _packed_headers(headers, f"messages[{place}].headers")
    if headers:
        _check_headers(headers, f"messages[{place}].headers", quotas)
    ttl_seconds = None if entry.ttl_seconds is UNSET else entry.ttl_seconds
    delay_seconds = entry.delay_seconds or 0.0
    return NewMessage(body, headers, message_id, ordering_key, entry.dedup_id or None, delay_seconds, ttl_seconds)


def _unusual_body(entry: PublishEntry, place: int) -> bytes:
    """Decode a body that is given in base64, or in MessagePack. Raises: InvalidRequest, MessageTooLarge."""
    field = f"messages[{place}].body"
    encoded = entry.body_base64
    if entry.body is UNSET and encoded is UNSET:
        raise InvalidRequest(f"{field} or body_base64 is required; an empty body is an empty string", field=field)
    if isinstance(entry.body, Raw) and encoded is UNSET:
        return _packed_body(entry.body, field)
    if encoded is UNSET:
        raise InvalidRequest(f"{field} must be a string; write bytes as body_base64, or send MessagePack", field=field)
    if entry.body is not UNSET:
        raise InvalidRequest(f"messages[{place}] has both body and body_base64; give one of them", field=field)
    if len(encoded) > _BASE64_LENGTH_MAX:
        raise _too_large(place)
    try:
        return b64decode(encoded, validate=True)
    except ValueError as error:
        field += "_base64"
        raise InvalidRequest(f"{field} is not standard base64 with padding ({error})", field=field) from error


def _packed_body(body: Raw, field: str) -> bytes:
    try:
        return _packed_text(body).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{field} is text that is not valid UTF-8; send it as bytes", field=field) from error
    except ValidationError:
        pass
    try:
        return _packed_bytes(body)
    except ValidationError as error:
        raise InvalidRequest(f"{field} must be a string or bytes", field=field) from error


def _packed_headers(headers: Mapping[str, Any], field: str) -> Mapping[str, HeaderValue]:
    """Return headers whose values are still in MessagePack (``Raw``). Raises: InvalidRequest."""
    found: dict[str, HeaderValue] = {}
    for name, value in headers.items():
        try:
            found[name] = _packed_value(value)
        except (ValidationError, UnicodeDecodeError) as error:
            raise _bad_header(field, name, _HEADER_VALUES) from error
    return found


def _too_large(place: int) -> MessageTooLarge:
    limit = MESSAGE_BYTES_MAX >> 20
    return MessageTooLarge(f"the body of messages[{place}] is larger than {limit} MiB", field=f"messages[{place}].body")


def _check_short(text: str, place: int, name: str) -> None:
    if not text.isascii() and len(text.encode()) > SHORT_STRING_BYTES_MAX:
        field = f"messages[{place}].{name}"
        raise InvalidRequest(f"{field} must have at most {SHORT_STRING_BYTES_MAX} bytes in UTF-8", field=field)


def _check_headers(headers: Mapping[str, Any], field: str, quotas: Quotas) -> None:
    if len(headers) > quotas.headers_max:
        raise _over(f"{field}: more than {quotas.headers_max} headers", "headers_max", field)
    total = 0
    for name, value in headers.items():
        name_bytes = len(name) if name.isascii() else len(name.encode())
        if not 1 <= name_bytes <= SHORT_STRING_BYTES_MAX:
            raise _bad_header(field, name, f"the name must have 1 to {SHORT_STRING_BYTES_MAX} bytes")
        if name[: len(RESERVED_HEADER_PREFIX)].lower() == RESERVED_HEADER_PREFIX:
            raise _bad_header(field, name, f"names that begin with {RESERVED_HEADER_PREFIX} are reserved for popgate")
        total += name_bytes
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode())
        elif isinstance(value, int):
            if not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
                raise _bad_header(field, name, "a whole number must fit in 64 bits; write it as a string")
            total += _NUMBER_BYTES
        elif isinstance(value, float):
            if not isfinite(value):
                raise _bad_header(field, name, "a number must be finite")
            total += _NUMBER_BYTES
        elif value is not None:
            raise _bad_header(field, name, _HEADER_VALUES)
    if total > quotas.headers_bytes_max:
        limit = _shown_size(quotas.headers_bytes_max)
        raise _over(f"{field}: more than {limit} in total", "headers_bytes_max", field)


def _over(what: str, setting: str, field: str) -> MessageTooLarge:
    return MessageTooLarge(f"{what}: send less, or raise {flag_of(setting)}", field=field)


def _shown_size(size: int) -> str:
    return f"{size} bytes" if size % 1024 else f"{size >> 10} KiB"


def _bad_header(field: str, name: str, requirement: str) -> InvalidRequest:
    field = f"{field}.{name[:QUOTED_LENGTH_MAX]}"
    return InvalidRequest(f"{field}: {requirement}", field=field)


# -- pop and settlements ----------------------------------------------------------------------------------------------


def pop_request(request: PopRequestBody, quotas: Quotas, *, packed: bool) -> PopRequest:
    """Return a pop in the engine's form. ``packed``: the answer is written in MessagePack. Raises: InvalidRequest."""
    max_messages = request.max_messages or 1.0
    if not max_messages.is_integer():  # JSON has only one type of number: 2.0 is a whole number, like 2
        raise InvalidRequest("max_messages must be a whole number", field="max_messages")
    return PopRequest(
        max_messages=int(max_messages),
        wait_seconds=request.wait_seconds or 0.0,
        invisibility_seconds=request.invisibility_seconds or None,
        attempt_id=request.attempt_id or None,
        client=None if request.client_id is UNSET else client_name(request.client_id),
        selection=FilteredSelection(_header_filter(request.filter, quotas)) if request.filter else ANY,
        answer_bytes=packed_bytes if packed else json_bytes,
    )


def _header_filter(wanted: Mapping[str, FilterValue | list[FilterValue]], quotas: Quotas) -> HeaderFilter:
    lists = {name: value if isinstance(value, list) else [value] for name, value in wanted.items()}
    if sum(_size(name) + sum(map(_size, values)) for name, values in lists.items()) > quotas.filter_bytes_max:
        limit = _shown_size(quotas.filter_bytes_max)
        remedy = f"name fewer values, or raise {flag_of('filter_bytes_max')}"
        raise InvalidRequest(f"filter has more than {limit} in total: {remedy}", field="filter")
    return header_filter(lists)


def _size(value: FilterValue) -> int:
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else _NUMBER_BYTES


def ack_orders(request: AckRequest) -> Sequence[SettleOrder]:
    return _acks(request.receipt_handles)


def release_orders(request: ReleaseRequest) -> Sequence[SettleOrder]:
    return _releases(request.entries)


def extend_orders(request: ExtendRequest) -> Sequence[SettleOrder]:
    return _extensions(request.entries)


def reject_orders(request: RejectRequest) -> Sequence[SettleOrder]:
    return _rejections(request.entries)


NO_SETTLEMENTS: Mapping[Verb, Sequence[SettleOrder]] = {}


def settlements(request: PopRequestBody) -> Mapping[Verb, Sequence[SettleOrder]]:
    """Return the settlements that the request of a pop contains."""
    if not (request.ack or request.release or request.extend or request.reject):
        return NO_SETTLEMENTS
    orders = {
        Verb.ACK: _acks(request.ack or ()),
        Verb.RELEASE: _releases(request.release or ()),
        Verb.EXTEND: _extensions(request.extend or ()),
        Verb.REJECT: _rejections(request.reject or ()),
    }
    return {verb: many for verb, many in orders.items() if many}


def _acks(handles: Sequence[str]) -> Sequence[SettleOrder]:
    return [SettleOrder(handle) for handle in handles]


def _releases(entries: Sequence[ReleaseEntry]) -> Sequence[SettleOrder]:
    return [
        SettleOrder(
            one.receipt_handle,
            None if one.delay_seconds is UNSET else one.delay_seconds,
            one.reason or "",
            _cause(one),
        )
        for one in entries
    ]


def _extensions(entries: Sequence[ExtendEntry]) -> Sequence[SettleOrder]:
    return [SettleOrder(one.receipt_handle, one.invisibility_seconds) for one in entries]


def _rejections(entries: Sequence[RejectEntry]) -> Sequence[SettleOrder]:
    return [SettleOrder(one.receipt_handle, None, one.reason or "", _cause(one)) for one in entries]


def _cause(entry: ReleaseEntry | RejectEntry) -> Cause | None:
    """Return why a client gives a message back, or None if it does not say. Raises: InvalidRequest."""
    if entry.error is UNSET and entry.client_id is UNSET:
        return None
    client = "" if entry.client_id is UNSET else client_name(entry.client_id)
    return Cause(client=client) if entry.error is UNSET else Cause(entry.error.type, entry.error.text, client)


# -- the readers ------------------------------------------------------------------------------------------------------


PUBLISH = Reader(PublishRequest, PackedPublishRequest)
POP = Reader(PopRequestBody)
ACK = Reader(AckRequest)
RELEASE = Reader(ReleaseRequest)
EXTEND = Reader(ExtendRequest)
REJECT = Reader(RejectRequest)
