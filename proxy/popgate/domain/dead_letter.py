"""Writes and reads the headers of a dead letter: why, when, after how many deliveries and in which queue it failed.

The names of these headers begin with ``x-popgate-``, a prefix that publishers may not use. So a redrive can remove
exactly these headers, and the redriven message equals the message that its publisher sent.

If the publisher's headers leave no room for the headers of popgate, the dead letter is *packed*: the publisher's
headers are put in front of the body. A message that popgate itself can't process becomes *bare*: its body stays
unchanged, and one header that shows the original headers as text replaces them.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple, cast

from popgate.domain.attempts import Attempt, header_of, read_header
from popgate.domain.message import (
    MESSAGE_BYTES_MAX,
    RESERVED_HEADER_PREFIX,
    HeaderValue,
    Message,
    is_header_value,
    is_time,
)
from popgate.domain.names import CopyId, Subscription

MAX_DELIVERIES = "max_deliveries"
"""Reason and cause of a dead letter that was delivered ``max_deliveries`` times."""
REJECTED = "rejected"
UNREADABLE = "unreadable"
"""Cause of a dead letter that popgate failed twice to process."""

_CAUSE, _REASON = "x-popgate-dead-cause", "x-popgate-dead-reason"
_TOPIC, _GROUP, _QUEUE = "x-popgate-dead-topic", "x-popgate-dead-group", "x-popgate-dead-queue"
_DEAD_AT, _FIRST_DELIVERED_AT = "x-popgate-dead-at", "x-popgate-first-delivered-at"
_ERROR_TYPE, _ERROR_TEXT = "x-popgate-dead-error-type", "x-popgate-dead-error-text"
_CLIENT, _ATTEMPTS = "x-popgate-dead-client", "x-popgate-dead-attempts"
_DELIVERY_COUNT, _ORIGIN = "x-popgate-delivery-count", "x-popgate-origin-copy-id"
_UNREADABLE_HEADERS = "amqp-unreadable-headers"
_UNREADABLE_CHARACTERS_MAX = 4_096
_COUNT_MAX = 2**31 - 1
"""Largest count or index of a queue in the headers of a dead letter. The journal's columns have 32 bits."""
_HEADERS_BYTES = "x-popgate-dead-headers-bytes"
"""Header of a packed dead letter. Its value is the number of bytes of JSON in front of the body. This JSON contains the
publisher's headers."""


class DeadLetterDetails(NamedTuple):
    """Why and when a message was dead-lettered. All fields are None if popgate did not dead-letter it.

    ``queue`` is the index of the queue that the message came from; times are Unix seconds. ``attempts`` are the latest
    attempts that were recorded.
    """

    cause: str | None = None
    reason: str | None = None
    queue: int | None = None
    delivery_count: int | None = None
    first_delivered_at: float | None = None
    dead_lettered_at: float | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def last_error(self) -> Attempt | None:
        """The latest attempt with an error, or None."""
        return next((one for one in reversed(self.attempts) if one.error_type or one.error_text), None)

    @property
    def last_client(self) -> str | None:
        """The client that had the message last, if this is known."""
        return (self.attempts[-1].client or None) if self.attempts else None


def dead_letter_headers(
    headers: Mapping[str, HeaderValue], note: DeadLetterDetails, subscription: Subscription, origin: CopyId
) -> dict[str, HeaderValue]:
    """Return ``headers`` and the headers that describe the dead letter. ``origin`` is the copy that was
    dead-lettered."""
    error = note.last_error
    described: dict[str, HeaderValue] = {
        _ERROR_TYPE: error and error.error_type,
        _ERROR_TEXT: error and error.error_text,
        _CLIENT: note.last_client,
        _ATTEMPTS: header_of(note.attempts) if note.attempts else None,
    }
    return {
        **{name: value for name, value in headers.items() if name not in described},  # a program may have set them
        **{name: value for name, value in described.items() if value},
        _CAUSE: note.cause,
        _REASON: note.reason,
        _TOPIC: subscription.topic,
        _GROUP: subscription.group,
        _QUEUE: note.queue,
        _DEAD_AT: note.dead_lettered_at,
        _DELIVERY_COUNT: note.delivery_count,
        _FIRST_DELIVERED_AT: note.first_delivered_at,
        _ORIGIN: origin,
    }


def publisher_headers(headers: Mapping[str, HeaderValue]) -> dict[str, HeaderValue]:
    """Return ``headers`` without the headers whose names are reserved for popgate."""
    return {name: value for name, value in headers.items() if not name.startswith(RESERVED_HEADER_PREFIX)}


def bare(message: Message) -> Message:
    """Return the message with a single header, which shows the original headers as text. Never raises.

    The body, the ids and the time of publishing stay unchanged.
    """
    try:
        if list(message.headers) == [_UNREADABLE_HEADERS]:
            return message
        headers = repr(message.headers)[:_UNREADABLE_CHARACTERS_MAX].encode("ascii", "backslashreplace").decode()
    except Exception as error:
        headers = f"can't be shown: {type(error).__name__}"
    return Message(
        copy_id=message.copy_id,
        message_id=message.message_id,
        body=message.body,
        headers={_UNREADABLE_HEADERS: headers[:_UNREADABLE_CHARACTERS_MAX]},
        ordering_key=None,
        published_at=message.published_at,
    )


def packed(letter: Message) -> Message:
    """Return the dead letter with its publisher's headers in front of its body, for a broker that can't carry them.

    If the body would exceed the maximum size of a message, the publisher's headers are dropped.
    """
    headers = json.dumps(publisher_headers(letter.headers)).encode()
    without = stripped(letter)
    if len(headers) + len(letter.body) > MESSAGE_BYTES_MAX:
        return without
    return without._replace(headers={**without.headers, _HEADERS_BYTES: len(headers)}, body=headers + letter.body)


def stripped(letter: Message) -> Message:
    """Return the dead letter without its publisher's headers, for a broker that refuses the longer body of a packed
    one."""
    notes = {name: value for name, value in letter.headers.items() if name.startswith(RESERVED_HEADER_PREFIX)}
    return letter._replace(headers=notes)


def unpacked(letter: Message) -> Message:
    """Return the dead letter as it was before it was packed. A dead letter that is not packed is returned unchanged."""
    size = _count(letter.headers.get(_HEADERS_BYTES))
    if size is None or size > len(letter.body):
        return letter
    try:
        found: object = json.loads(letter.body[:size])
    except (ValueError, RecursionError):
        return letter
    if not isinstance(found, dict) or not is_header_value(cast("object", found), depth=0):
        return letter
    headers = cast("dict[str, HeaderValue]", found)
    notes = {name: value for name, value in letter.headers.items() if name != _HEADERS_BYTES}
    return letter._replace(headers={**publisher_headers(headers), **notes}, body=letter.body[size:])


def dead_letter_details(headers: Mapping[str, HeaderValue]) -> DeadLetterDetails:
    """Return the values of a dead letter's headers. A value that popgate would not write is treated as missing."""
    return DeadLetterDetails(
        cause=_text(headers.get(_CAUSE)),
        reason=_text(headers.get(_REASON)),
        queue=_count(headers.get(_QUEUE)),
        delivery_count=_count(headers.get(_DELIVERY_COUNT)),
        first_delivered_at=_seconds(headers.get(_FIRST_DELIVERED_AT)),
        dead_lettered_at=_seconds(headers.get(_DEAD_AT)),
        attempts=tuple(read_header(headers.get(_ATTEMPTS))),
    )


def origin_of(headers: Mapping[str, HeaderValue]) -> str | None:
    """Return the copy id that a dead letter had in its queue, or None if popgate did not dead-letter it."""
    return _text(headers.get(_ORIGIN))


def _text(value: HeaderValue) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: HeaderValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX else None


def _seconds(value: HeaderValue) -> float | None:
    return float(value) if is_time(value) else None
