"""Converts messages to and from JSON lines: the input of ``publish --json-lines``, and the output of ``pop`` and
``tail``.

The output can be used as input, because the input's fields that only a popped message has are ignored. So ``popgate pop
a | popgate publish b --json-lines`` copies messages.
"""

import base64
import binascii
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from popgate.cli.printing import Column, JsonObject, duration, field, json_line, visible
from popgate_client import Message, OutgoingMessage, RequestInvalid
from popgate_client.wire import outgoing_entry

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
ONLY_POPPED = frozenset(
    {"receipt_handle", "queue", "delivery_count", "published_at", "first_delivered_at", "invisible_until"}
)
_TEXTS = ("message_id", "ordering_key", "dedup_id")
_SECONDS = ("delay_seconds", "ttl_seconds")


class BadMessage(Exception):
    """A line of the input is not a valid message. The text of the error is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values from the flags, which apply to every message. A JSON line may override these values."""

    headers: Mapping[str, str]
    ordering_key: str | None
    message_id: str | None
    dedup_id: str | None = None
    delay_seconds: float | None = None
    ttl_seconds: float | None = None


def outgoing(body: bytes, defaults: Defaults) -> OutgoingMessage:
    """Create a message with this body and the default values."""
    return OutgoingMessage(
        body=_text_or_bytes(body),
        headers=defaults.headers or None,
        ordering_key=defaults.ordering_key,
        message_id=defaults.message_id,
        dedup_id=defaults.dedup_id,
        delay_seconds=defaults.delay_seconds,
        ttl_seconds=defaults.ttl_seconds,
    )


def outgoing_from_json(line: bytes, defaults: Defaults) -> OutgoingMessage:
    """Create a message from a line of JSON and the default values. Raises: BadMessage."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the line is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadMessage('the line is not a JSON object such as {"body":"hello"}')
    given = cast("dict[str, Any]", value)
    fields = {name: one for name, one in given.items() if name not in ONLY_POPPED and one is not None}
    body = _body(fields)
    headers = fields.pop("headers", {})
    if not isinstance(headers, dict):
        raise BadMessage("headers must be an object")
    for name, one in fields.items():
        _check_option(name, one)
    options: dict[str, Any] = {
        "ordering_key": defaults.ordering_key,
        "message_id": defaults.message_id,
        "delay_seconds": defaults.delay_seconds,
        "ttl_seconds": defaults.ttl_seconds,
        **fields,
    }
    message = OutgoingMessage(body=body, headers={**defaults.headers, **headers} or None, **options)
    try:
        outgoing_entry(message)
    except RequestInvalid as error:  # half a character, NaN: otherwise the other messages of the request fail, too
        raise BadMessage(error.detail) from error
    return message


def _body(fields: dict[str, Any]) -> str | bytes:
    if ("body" in fields) == ("body_base64" in fields):
        raise BadMessage("give either body or body_base64")
    if "body" in fields:
        body: object = fields.pop("body")
        if not isinstance(body, str):
            raise BadMessage("body must be a string; write other JSON as a quoted string")
        return body
    try:
        return base64.b64decode(fields.pop("body_base64"), validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadMessage(f"body_base64 is not base64 ({error})") from error


def _check_option(name: str, value: object) -> None:
    if name in _TEXTS:
        if not isinstance(value, str):
            raise BadMessage(f"{name} must be a string")
    elif name in _SECONDS:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadMessage(f"{name} must be a number of seconds")
    else:
        raise BadMessage(f"{name!r} is not a field of a message")


def popped(message: Message) -> JsonObject:
    """Return a leased message as the JSON object that ``pop`` prints. Its fields are those of the HTTP interface."""
    body = _text_or_bytes(message.body)
    fields: dict[str, Any] = {
        "message_id": message.message_id,
        "receipt_handle": message.receipt_handle,
        **({"body": body} if isinstance(body, str) else {"body_base64": base64.b64encode(body).decode("ascii")}),
        "headers": dict(message.headers),
        "ordering_key": message.ordering_key,
        "queue": message.queue,
        "delivery_count": message.delivery_count,
        "published_at": message.published_at,
        "first_delivered_at": message.first_delivered_at,
        "invisible_until": message.invisible_until,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _text_or_bytes(body: bytes) -> str | bytes:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body


def _body_cell(row: JsonObject) -> str:
    body: str | None = row.get("body")
    if body is None:
        return f"(binary, {len(base64.b64decode(row['body_base64']))} B)"
    return visible(body)


def _age_cell(row: JsonObject) -> str:
    published_at: float | None = row.get("published_at")
    return "-" if published_at is None else duration(max(0.0, time.time() - published_at))


MESSAGE_COLUMNS = (
    Column("MESSAGE ID", field("message_id")),
    Column("QUEUE", field("queue")),
    Column("ORDERING KEY", field("ordering_key"), is_wide=True),
    Column("HEADERS", lambda row: visible(json_line(row["headers"])), is_wide=True),
    Column("COUNT", field("delivery_count")),
    Column("AGE", _age_cell),
    Column("BODY", _body_cell, clips=True),
)
HANDLE_COLUMN = Column("RECEIPT HANDLE", field("receipt_handle"))
