"""Describes the differences between versions of RabbitMQ that affect popgate (docs/rabbitmq.md has the whole table)."""

from typing import TypeAlias

from aiormq.abc import AbstractConnection

from popgate.adapters.rabbitmq.properties import ACQUIRED_COUNT_HEADER, DELIVERY_COUNT_HEADER

Version: TypeAlias = tuple[int, ...]
"""Major, minor and patch numbers. Parts that are not numbers are omitted."""

DISCONNECTED_TIMEOUT, DISCONNECTED_MILLISECONDS = "x-consumer-disconnected-timeout", 500
"""A queue argument and its value: milliseconds that a quorum queue waits before it redelivers the messages of a
consumer whose node is lost. Leases and fencing tokens already exclude this consumer, so waiting gains nothing. Versions
before 4.3 do not wait at all. RabbitMQ's default is a minute."""


def version_of(connection: AbstractConnection) -> Version:
    """Return the version of the connected broker."""
    text = str(connection.server_properties.get("version", ""))
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def has_default_delivery_limit(version: Version) -> bool:
    """Return whether a quorum queue has a default delivery limit of 20, and drops messages that exceed it."""
    return version >= (4,)


def returns_unlimited_to_back(version: Version) -> bool:
    """Return whether a quorum queue with a delivery limit of -1 puts a returned message at its back.

    Before RabbitMQ 4, -1 is a limit like any other. From 4.3 on, all returned messages go to the front.
    """
    return (4,) <= version < (4, 3)


def counts_only_lost_channels(version: Version) -> bool:
    """Return whether a returned delivery counts towards the delivery limit only if its channel ended.

    If so, a delivery that was returned by a nack does not count.
    """
    return version >= (4, 3)


def count_header(version: Version) -> str:
    """Return the header in which a quorum queue counts all earlier deliveries of a message, however they ended.

    From 4.3 on, x-delivery-count counts only deliveries that ended with their channel.
    """
    return ACQUIRED_COUNT_HEADER if version >= (4, 3) else DELIVERY_COUNT_HEADER


def keeps_consumer_timeout(version: Version) -> bool:
    """Return whether a consumer of a quorum queue can choose its own consumer timeout (``x-consumer-timeout``).

    After this timeout, RabbitMQ cancels the consumer and leaves the consumer's channel open.
    """
    return version >= (4, 3)


def keeps_lost_exclusive_queues(version: Version) -> bool:
    """Return whether exclusive queues of a lost node may stay declared, and locked, until this node returns.

    They do if RabbitMQ's metadata is in Khepri: always from 4.3 on, and from 4.0 on if an operator has chosen Khepri.
    """
    return version >= (4,)


def stays_up_alone(version: Version) -> bool:
    """Return whether a node that is cut off from most of the other nodes may stay up, and keep its connections.

    It does if RabbitMQ's metadata is in Khepri: always from 4.3 on, and from 4.0 on if an operator has chosen Khepri.
    Otherwise, the node pauses itself if ``pause_minority`` is configured.
    """
    return version >= (4,)


def waits_for_lost_nodes(version: Version) -> bool:
    """Return whether a quorum queue waits for some time before it returns messages from a lost node."""
    return version >= (4, 3)
