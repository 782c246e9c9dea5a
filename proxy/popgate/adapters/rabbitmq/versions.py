"""What differs between versions of RabbitMQ, as far as popgate has to know (docs/rabbitmq.md has the whole table)."""

from typing import TypeAlias

from aiormq.abc import AbstractConnection

from popgate.adapters.rabbitmq.properties import ACQUIRED_COUNT_HEADER, DELIVERY_COUNT_HEADER

Version: TypeAlias = tuple[int, ...]
"""Major, minor and patch, as far as they are numbers."""

DISCONNECTED_TIMEOUT, DISCONNECTED_MILLISECONDS = "x-consumer-disconnected-timeout", 500
"""How long a quorum queue keeps the messages of a consumer whose node is lost. Leases and fencing tokens exclude that
consumer already, so waiting gains nothing; earlier versions do not wait at all. RabbitMQ's default is a minute."""


def version_of(connection: AbstractConnection) -> Version:
    """The version of the broker at the other end."""
    text = str(connection.server_properties.get("version", ""))
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def has_default_delivery_limit(version: Version) -> bool:
    """Whether a quorum queue without a delivery limit has one of 20, and drops a message that passes it."""
    return version >= (4,)


def returns_unlimited_to_back(version: Version) -> bool:
    """Whether a quorum queue whose delivery limit is -1 puts a returned message at its back.

    Before RabbitMQ 4, -1 is a limit like any other. From 4.3 on, all that is returned goes to the front.
    """
    return (4,) <= version < (4, 3)


def counts_only_lost_channels(version: Version) -> bool:
    """Whether a returned message counts towards the delivery limit only when its channel ended, not after a nack."""
    return version >= (4, 3)


def count_header(version: Version) -> str:
    """The header in which a quorum queue counts earlier deliveries of a message, of whatever end.

    From 4.3 on x-delivery-count counts only those that ended with their channel.
    """
    return ACQUIRED_COUNT_HEADER if version >= (4, 3) else DELIVERY_COUNT_HEADER


def keeps_consumer_timeout(version: Version) -> bool:
    """Whether a consumer of a quorum queue can choose how long it may hold a delivery (``x-consumer-timeout``).

    When that time has passed, RabbitMQ cancels the consumer and leaves its channel open.
    """
    return version >= (4, 3)


def keeps_lost_exclusive_queues(version: Version) -> bool:
    """Whether exclusive queues of a lost node may stay declared, and locked, until that node comes back.

    They do where the metadata is in Khepri: always from 4.3 on, and from 4.0 on where an operator has chosen it.
    """
    return version >= (4,)


def stays_up_alone(version: Version) -> bool:
    """Whether a node that is cut off from most of the others may stay up, and keep its connections.

    It does where the metadata is in Khepri, as above. Elsewhere it pauses itself, if it is told to (pause_minority).
    """
    return version >= (4,)


def waits_for_lost_nodes(version: Version) -> bool:
    """Whether a quorum queue waits before it returns what a consumer on a lost node held, and knows for how long."""
    return version >= (4, 3)
