"""Turns what a caller publishes into messages, and failed results into errors. Does no I/O.

A body is text, bytes, or any value that the client's serializer accepts: by default, what JSON can represent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

from popgate_client.errors import PopgateError
from popgate_client.keywords import check_keywords
from popgate_client.message import OutgoingMessage, PublishResult

Serializer: TypeAlias = Callable[[Any], str | bytes]
"""Returns the body of a message for a value that is neither text nor bytes, such as ``msgspec.json.encode``."""
Deserializer: TypeAlias = Callable[[bytes], Any]
"""Returns the value for a body, such as ``msgspec.json.decode``, or ``Order.model_validate_json`` of pydantic."""


class PublishOptions(TypedDict, total=False):
    """The options of one message; see `OutgoingMessage`."""

    headers: Mapping[str, Any] | None
    message_id: str | None
    ordering_key: str | None
    dedup_id: str | None
    delay_seconds: float | None
    ttl_seconds: float | None


class PublishFailed(PopgateError):
    """Some messages of a publish are not stored. `results` has one result per message, in order, and `failed` the
    places of those that failed, counted from 0. The others are stored: don't publish them again."""

    def __init__(self, results: Sequence[PublishResult], failed: Sequence[int]) -> None:
        first = results[failed[0]].error or {}
        super().__init__(
            "publish_failed",
            f"{len(failed)} of {len(results)} messages are not stored; number {failed[0] + 1}: "
            f"{first.get('detail', 'the server gave no reason')} ({first.get('code', 'failed')})",
        )
        self.results = results
        self.failed = failed


_OF_ONE_MESSAGE = ("message_id", "dedup_id")


def in_json(value: object) -> str:
    """Return the value as JSON. Raises: TypeError, ValueError if JSON can't represent it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def outgoing(messages: Sequence[Any], options: PublishOptions, serializer: Serializer) -> list[OutgoingMessage]:
    """Return the messages to send. The options apply to all plain bodies.

    Raises: TypeError if an option is unknown, or if the serializer does not accept a body; ValueError if an option
    can't apply to these messages.
    """
    check_keywords("publish", options, PublishOptions.__optional_keys__)
    given = [name for name, value in options.items() if value is not None]
    if given and any(isinstance(message, OutgoingMessage) for message in messages):
        raise ValueError(f"{given[0]} applies to plain bodies only; set it in each OutgoingMessage")
    if len(messages) > 1 and (name := next((one for one in given if one in _OF_ONE_MESSAGE), None)):
        raise ValueError(f"{name} is for one message; to publish several, make each an OutgoingMessage with its own")
    whole = (one if isinstance(one, OutgoingMessage) else OutgoingMessage(body=one, **options) for one in messages)
    return [_serialized(one, serializer) for one in whole]


def _serialized(message: OutgoingMessage, serializer: Serializer) -> OutgoingMessage:
    body: object = message.body
    if isinstance(body, str | bytes):
        return message
    if isinstance(body, bytearray):
        return message.with_body(bytes(body))
    try:
        return message.with_body(serializer(body))
    except (TypeError, ValueError, RecursionError) as error:
        hint = "; to publish several messages, unpack them: publish(topic, *messages)" if _has_messages(body) else ""
        raise TypeError(
            f"a body of type {type(body).__name__} can't be written as JSON ({error}): give text, bytes, JSON values, "
            f"or a `serializer` to the client{hint}"
        ) from error


def _has_messages(body: Any) -> bool:
    return isinstance(body, list | tuple) and OutgoingMessage in map(type, cast("Sequence[object]", body))


def raise_for_failures(results: Sequence[PublishResult]) -> None:
    """Raise an error if a message is not stored: its own one for a single message, otherwise PublishFailed."""
    failed = [number for number, result in enumerate(results) if not result.ok]
    if not failed:
        return
    if len(results) == 1:
        results[0].raise_for_status()
    raise PublishFailed(results, failed)
