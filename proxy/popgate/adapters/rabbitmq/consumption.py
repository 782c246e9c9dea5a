"""Says how a queue is consumed, and whether a queue that is no longer consumed was deleted."""

import asyncio
from dataclasses import dataclass

from popgate.adapters.rabbitmq.queue_shape import is_gone
from popgate.adapters.rabbitmq.session import ChannelRefusedError, Session
from popgate.domain.identity import TagChecker
from popgate.domain.names import BrokerQueue

DELETION_LOOKS_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Seconds to wait before each check whether the queue of a cancelled consumer was deleted: RabbitMQ needs some
milliseconds for the deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The queue to consume, and how to consume it.

    `check_tag` checks the identity tags of copy ids. `exclusive` asks the broker to refuse other consumers, which
    RabbitMQ does on classic queues only. `quorum`: the queue is a quorum queue. RabbitMQ counts deliveries only on
    these; on other queues, a publisher wrote the count header. `consumer_timeout_seconds` is RabbitMQ's own timeout. On
    versions that let the consumer choose, `asked_timeout_seconds` replaces it. `foreign`: other applications publish
    here, so readers need the exchange and the routing key. `notes`: the messages are dead letters, whose headers give
    the reason. `unique_message_ids`: a publisher's message_id can serve as a copy id. `lost_node_at` is the loop time
    at which the node of the former consumer was found lost, or None if it was not.
    """

    queue: BrokerQueue
    consumer_timeout_seconds: float
    asked_timeout_seconds: float
    check_tag: TagChecker
    exclusive: bool = False
    quorum: bool = True
    foreign: bool = False
    notes: bool = False
    unique_message_ids: bool = False
    lost_node_at: float | None = None


async def is_deleted(session: Session, queue: BrokerQueue) -> bool:
    """Return whether the queue of a cancelled consumer was deleted.

    RabbitMQ 4.3 notifies consumers before it has deleted the queue, so this checks several times. Raises:
    BrokerUnavailable.
    """
    for seconds in DELETION_LOOKS_SECONDS:
        await asyncio.sleep(seconds)
        if await _is_absent(session, queue):
            return True
    return False


async def _is_absent(session: Session, queue: BrokerQueue) -> bool:
    probe = await session.open_channel()
    try:
        await session.call(probe.queue_declare(queue, passive=True))
    except ChannelRefusedError as error:
        return is_gone(error.reason)
    finally:
        await session.close_channel(probe)
    return False
