"""The guard queue: two popgates without shared state must not work on one virtual host.

Each would lease the other's messages. An exclusive queue belongs to one connection, so whoever declares it first keeps
the others out until that connection ends. A popgate that was killed lets go at once; one whose host is gone, only after
RabbitMQ has missed its heartbeats.
"""

import asyncio
import logging
import random

from popgate.adapters.rabbitmq.session import RESOURCE_LOCKED, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable

GUARD_QUEUE = "popgate:guard"
RETRY_SECONDS = 0.5

_log = logging.getLogger(__name__)


class GuardHeldError(Exception):
    """Another connection holds the guard queue."""


async def take_guard(session: Session, *, wait_seconds: float, chance: random.Random) -> None:
    """Return once `session` holds the guard queue; it holds it until it ends.

    Raises: GuardHeldError when somebody else still has it after `wait_seconds`; BrokerUnavailable.
    """
    deadline = asyncio.get_running_loop().time() + wait_seconds
    told = False
    while True:
        try:
            await _declare(session)
        except ChannelRefusedError as error:
            if error.reason.code != RESOURCE_LOCKED:
                raise BrokerUnavailable(f"RabbitMQ refuses the queue {GUARD_QUEUE}: {error}") from error
            if asyncio.get_running_loop().time() >= deadline:
                raise GuardHeldError from error
        else:
            return
        if not told:
            told = True
            _log.info("another popgate holds the guard queue; waiting", extra={"wait_seconds": wait_seconds})
        await asyncio.sleep(RETRY_SECONDS * chance.uniform(0.8, 1.2))


async def _declare(session: Session) -> None:
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_declare(GUARD_QUEUE, exclusive=True))
    finally:
        await session.close_channel(channel)
