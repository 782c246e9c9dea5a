"""Moves a message to the group's dead-letter queue as popgate's proxies do, so that they can list and redrive it.

The headers are those of ``popgate.domain.dead_letter``. Only a proxy can give a dead letter an identity, because that
needs the proxies' secret; this one has none until it is redriven.
"""

import time
from typing import Any, cast

from aiormq.abc import DeliveredMessage
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from popgate_client.amqp.delivered import DELIVERY_COUNTS
from popgate_client.amqp.group import Group
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable
from popgate_client.message import Message


async def publish_dead_letter(
    session: Session, group: Group, delivered: DeliveredMessage, message: Message, cause: str, reason: str | None
) -> None:
    """Publish the dead letter, and return when RabbitMQ has confirmed it. The caller must still ack the message.

    Raises: BrokerUnavailable.
    """
    now = time.time()
    properties = delivered.header.properties
    table = (properties.headers or {}).items()
    headers = {name: _sendable(value) for name, value in table if name not in DELIVERY_COUNTS}
    origin = headers.pop("x-popgate-copy-id", "")
    headers.pop("x-popgate-identity", None)
    headers |= {
        "x-popgate-dead-cause": cause,
        "x-popgate-dead-reason": reason or cause,
        "x-popgate-dead-topic": group.topic,
        "x-popgate-dead-group": group.name,
        "x-popgate-dead-queue": message.queue,
        "x-popgate-dead-at": now,
        "x-popgate-delivery-count": message.delivery_count,
        "x-popgate-first-delivered-at": message.first_delivered_at,
        "x-popgate-origin-copy-id": origin,
    }
    kept = {name: getattr(properties, name) for name in Basic.Properties.attributes() if name not in _NOT_KEPT}
    dead = Basic.Properties(**kept, headers=headers, delivery_mode=2)
    channel = await session.open_channel(confirms=True)
    try:
        publish = channel.basic_publish(message.body, routing_key=group.dead, properties=dead, mandatory=True)
        await session.call(publish)
    except (DeliveryError, ChannelRefused) as error:
        raise BrokerUnavailable("broker_unavailable", f"queue {group.dead!r} accepts no message: {error}") from error
    finally:
        await session.close_channel(channel)


_NOT_KEPT = frozenset({"headers", "delivery_mode", "expiration", "user_id", "cluster_id"})
"""Properties that a dead letter does not keep: RabbitMQ checks the user, and would drop a dead letter that expires."""


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
