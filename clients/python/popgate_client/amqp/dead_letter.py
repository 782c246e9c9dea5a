"""Moves a message to the group's dead-letter queue as popgate's proxies do, so that they can list and redrive it.

The headers are those of ``popgate.domain.dead_letter``. Only a proxy can give a dead letter an identity, because that
needs the proxies' secret; this one has none until it is redriven.
"""

import json
import time
from math import ceil
from typing import Any, cast

from aiormq.abc import DeliveredMessage
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from popgate_client.amqp.delivered import DELIVERY_COUNTS, ESCAPED_PREFIX
from popgate_client.amqp.group import Group
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.amqp.tries import ATTEMPTS, CAUSE_HEADERS, Tries
from popgate_client.amqp.working import DeadLetterCause
from popgate_client.errors import BrokerUnavailable
from popgate_client.message import Message


async def publish_dead_letter(
    session: Session,
    group: Group,
    delivered: DeliveredMessage,
    message: Message,
    cause: DeadLetterCause,
    tries: Tries,
) -> None:
    """Publish the dead letter, and return when RabbitMQ has confirmed it. The caller must still ack the message.

    Raises: BrokerUnavailable.
    """
    dead = _dead_letter(group, delivered, message, cause, tries, frame_bytes_max=session.frame_bytes_max)
    channel = await session.open_channel(confirms=True)
    try:
        publish = channel.basic_publish(message.body, routing_key=group.dead, properties=dead, mandatory=True)
        await session.call(publish)
    except (DeliveryError, ChannelRefused) as error:
        raise BrokerUnavailable("broker_unavailable", f"queue {group.dead!r} accepts no message: {error}") from error
    finally:
        await session.close_channel(channel)


def _dead_letter(
    group: Group,
    delivered: DeliveredMessage,
    message: Message,
    cause: DeadLetterCause,
    tries: Tries,
    *,
    frame_bytes_max: int,
) -> Basic.Properties:
    """Return the properties. If RabbitMQ can't carry the publisher's headers with those of popgate, one header shows
    their beginning. The proxies put such headers in front of the body, but take them out only of their own letters.
    """
    properties = delivered.header.properties
    table = properties.headers or {}
    origin = table.get("x-popgate-copy-id", "")
    notes: dict[str, Any] = {
        **tries.headers(),
        "x-popgate-dead-cause": cause.cause,
        "x-popgate-dead-reason": cause.reason or cause.cause,
        "x-popgate-dead-topic": group.topic,
        "x-popgate-dead-group": group.name,
        "x-popgate-dead-queue": message.queue,
        # Whole seconds: pamqp writes a float with 32 bits, which would be wrong by up to a minute.
        "x-popgate-dead-at": ceil(time.time()),
        "x-popgate-delivery-count": message.delivery_count,
        "x-popgate-first-delivered-at": int(message.first_delivered_at),
        "x-popgate-origin-copy-id": origin if isinstance(origin, str) else "",
    }
    headers = {_sent_name(name): _sendable(value) for name, value in table.items() if name not in _LEFT_OUT}
    kept = {name: getattr(properties, name) for name in Basic.Properties.attributes() if name not in _NOT_KEPT}
    dead = Basic.Properties(**kept, headers=headers | notes, delivery_mode=2)
    if _fits(dead, frame_bytes_max):
        return dead
    if message.ordering_key is not None:
        notes["x-popgate-ordering-key"] = message.ordering_key
    notes[_SHOWN_HEADERS] = json.dumps(dict(message.headers))[:_SHOWN_CHARACTERS_MAX]
    dead = Basic.Properties(
        message_id=properties.message_id, timestamp=properties.timestamp, headers=notes, delivery_mode=2
    )
    if not _fits(dead, frame_bytes_max):
        notes.pop(ATTEMPTS, None)  # the longest; the last error stays
    return dead


_NOT_KEPT = frozenset({"headers", "delivery_mode", "expiration", "user_id", "cluster_id"})
"""Properties that a dead letter does not keep: RabbitMQ checks the user, and would drop a dead letter that expires."""

_LEFT_OUT = frozenset({*DELIVERY_COUNTS, *CAUSE_HEADERS, "x-popgate-copy-id", "x-popgate-identity"})
_ROUTING = frozenset({"CC", "BCC"})
"""Headers that name further queues. RabbitMQ would put a copy of the dead letter there, with this program's rights."""
_FRAME_OVERHEAD_BYTES = 20
"""Bytes of a content header frame around its properties."""
_SHOWN_HEADERS = "amqp-unreadable-headers"
_SHOWN_CHARACTERS_MAX = 4_096


def _sent_name(name: str) -> str:
    return f"{ESCAPED_PREFIX}{name}" if name in _ROUTING else name


def _fits(properties: Basic.Properties, frame_bytes_max: int) -> bool:
    try:
        size = len(properties.marshal()) + _FRAME_OVERHEAD_BYTES
    except Exception:  # a value that pamqp reads but can't write, such as a number beyond 32 bits with a fraction
        return False
    return not frame_bytes_max or size <= frame_bytes_max


def _sendable(value: Any) -> Any:
    """Return a header value in a type that can be sent: text that is not UTF-8 was read as bytes, which can only be
    sent as a byte array."""
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]  # AMQP
        return [_sendable(one) for one in items]
    if isinstance(value, dict):
        return {name: _sendable(one) for name, one in cast("dict[str, Any]", value).items()}
    return value
