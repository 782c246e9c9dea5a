"""Turns RabbitMQ's deliveries into `Message`s with the same body, headers, ordering key and ids as over HTTP.

The twin of ``popgate.adapters.rabbitmq.properties``, which explains the details: popgate's headers are removed, header
values become JSON types, and properties that `Message` has no field for become headers (``amqp-...``).
"""

import time
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import inf, isfinite
from typing import Any, cast

from aiormq.abc import DeliveredMessage

from popgate_client.message import Message

OWN_PREFIX = "x-popgate-"
ESCAPED_PREFIX = "x-popgate-header-"
DELIVERY_COUNTS = ("x-acquired-count", "x-delivery-count")
"""Headers in which RabbitMQ counts deliveries: the first from 4.3 on (the second then counts something else), before
that the second."""
_PROPERTIES = ("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "user_id", "app_id")
_DEATHS = frozenset(
    {"x-death"} | {f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")}
)
"""Headers in which RabbitMQ records the path of a delayed message; readers don't need them."""


def read(delivered: DeliveredMessage, topic: str, group: str, queue: int) -> Message:
    """Return the message of a delivery. It has no lease: this program has it until it is settled or the channel ends,
    so `invisible_until` is infinite, and the receipt handle is not valid over HTTP."""
    properties = delivered.header.properties
    table: Mapping[str, Any] = properties.headers or {}
    own = {name: value for name, value in table.items() if name.startswith(OWN_PREFIX)}
    was_delayed = f"{OWN_PREFIX}visible-at" in own
    left_out = {*DELIVERY_COUNTS, *_DEATHS} if was_delayed else DELIVERY_COUNTS
    headers = {name: _value(value) for name, value in table.items() if name not in own and name not in left_out}
    for name, value in own.items():
        if name.startswith(ESCAPED_PREFIX):
            headers[name.removeprefix(ESCAPED_PREFIX)] = _value(value)
    for name in _PROPERTIES:
        if (value := getattr(properties, name)) is not None:
            headers[f"amqp-{name.replace('_', '-')}"] = value
    if properties.message_type is not None:
        headers["amqp-type"] = properties.message_type
    if properties.priority is not None:
        headers["amqp-priority"] = properties.priority
    if delivered.exchange and not own:
        headers["amqp-exchange"], headers["amqp-routing-key"] = delivered.exchange, delivered.routing_key
    ordering_key = own.get(f"{OWN_PREFIX}ordering-key")
    counts = [count for name in DELIVERY_COUNTS if isinstance(count := table.get(name), int)]
    returned = (counts or [1])[0] if delivered.redelivered else 0
    now = time.time()
    return Message(
        topic=topic,
        group=group,
        receipt_handle=f"amqp:{delivered.consumer_tag}:{delivered.delivery_tag}",
        body=delivered.body,
        headers=headers,
        message_id=properties.message_id or None,
        ordering_key=ordering_key if isinstance(ordering_key, str) else None,
        queue=queue,
        delivery_count=1 + returned,
        published_at=_seconds(own.get(f"{OWN_PREFIX}published-at"), properties.timestamp),
        first_delivered_at=now,
        invisible_until=inf,
    )


def is_expired(delivered: DeliveredMessage) -> bool:
    """Whether the message's time to live is over, so that it must not be delivered."""
    expires_at = (delivered.header.properties.headers or {}).get(f"{OWN_PREFIX}expires-at")
    return isinstance(expires_at, int | float) and expires_at <= time.time()


def _seconds(own: object, timestamp: datetime | None) -> float | None:
    if isinstance(own, int | float):
        return float(own)
    return None if timestamp is None else timestamp.timestamp()


def _value(value: Any) -> Any:
    match value:
        case bytes() | bytearray():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return b64encode(value).decode()
        case datetime():
            return value.isoformat()
        case Decimal():
            return str(value)
        case float():
            return value if isfinite(value) else None
        case list():
            items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]  # AMQP
            return [_value(one) for one in items]
        case dict():
            return {name: _value(one) for name, one in cast("dict[str, Any]", value).items()}
        case _:
            return value
