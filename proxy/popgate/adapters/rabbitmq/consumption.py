"""Defines the parameters of consuming a queue, and checks whether the queue of a cancelled consumer was deleted."""

import asyncio
from dataclasses import dataclass

from popgate.adapters.rabbitmq.queue_shape import is_gone
from popgate.adapters.rabbitmq.session import ChannelRefusedError, Session
from popgate.domain.identity import TagChecker
from popgate.domain.names import BrokerQueue

DELETION_LOOKS_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Seconds to wait before each check whether the queue of a cancelled consumer was deleted. Several checks are needed,
because RabbitMQ may complete the deletion only some milliseconds after it has cancelled the consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The queue to consume, and how to consume it.

    `check_tag` checks the identity tags of copy ids. `exclusive`: ask the broker to refuse other consumers, which
    RabbitMQ does only on classic queues. `quorum`: the queue is a quorum queue. RabbitMQ counts deliveries only on
    quorum queues; on another queue, a publisher must have written the count header. `consumer_timeout_seconds` is the
    consumer timeout that RabbitMQ is configured with. RabbitMQ versions that let the consumer choose its timeout use
    `asked_timeout_seconds` instead. `foreign`: other applications publish to this queue, so clients need the exchange
    and the routing key of a message. `notes`: the messages are dead letters, whose headers contain the reason.
    `unique_message_ids`: a publisher's message_id can serve as a copy id. `lost_node_at`: the loop time at which the
    proxy detected that the node of the former consumer was lost; None if that node was not lost.
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

    This function checks several times, because RabbitMQ 4.3 notifies consumers before it has deleted the queue. Raises:
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
