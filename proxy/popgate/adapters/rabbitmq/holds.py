"""Who may consume a queue: one at a time, also while RabbitMQ has no consumer of the one who may.

Theory of operation. A single active consumer keeps others waiting only while it consumes, and popgate's consumers
pause, and stop for a moment where a prefetch changes. A proxy that was stopped just then, and overtaken, still has
messages that belong in front of all others; whoever consumed now would hand out what comes behind them. So each proxy
holds an exclusive queue beside every queue that it consumes, on the same connection. It ends with that connection, as
everything does that RabbitMQ has delivered there, or when the proxy has closed its channel and lets go.

The name says whose place is taken: it is the queue's own, so nobody else has to be asked. Programs that consume without
a proxy (``popgate_client.amqp``) hold the queues that they work on in the same way.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from hashlib import sha1

from popgate.adapters.rabbitmq.session import NOT_FOUND, RESOURCE_LOCKED, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.names import BrokerQueue

_log = logging.getLogger(__name__)

PREFIX = "popgate:consumer:"
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.05
DECLARE_SECONDS_MAX = 300.0
"""While a node hangs RabbitMQ declares nothing until it has given that one up (``net_ticktime``), and then it does."""
_NOT_YET = (RESOURCE_LOCKED, NOT_FOUND)
"""Somebody has it; or had it on a node that is down, which the others have yet to find out."""


class Holds:
    """What this process holds on the session that it consumes on."""

    def __init__(self, session: Callable[[], Session], *, chance: random.Random) -> None:
        self._session = session
        self._chance = chance
        self._wanted: set[BrokerQueue] = set()
        self._held: dict[BrokerQueue, Session] = {}
        self._changing: dict[BrokerQueue, asyncio.Lock] = {}
        """While one of a queue is declared or deleted: the two must not overtake one another at RabbitMQ."""

    async def take(self, queue: BrokerQueue) -> Session:
        """The session on which ``queue`` may be consumed; waits until nobody else holds it.

        Raises: BrokerUnavailable, also when it is let go meanwhile.
        """
        self._wanted.add(queue)
        is_told = False
        while queue in self._wanted:
            async with self._changing.setdefault(queue, asyncio.Lock()):
                session = self._session()
                if self._held.get(queue) is session:
                    return session
                if queue in self._wanted and await _declare(session, queue):
                    self._held[queue] = session
                    return session
            if not is_told:
                is_told = True
                _log.info("a queue is consumed once another proxy or program has let go of it", extra={"queue": queue})
            await asyncio.sleep(RETRY_SECONDS * self._chance.uniform(0.8, 1.2))
        raise BrokerUnavailable(f"queue {queue!r} is not this proxy's to consume any more")

    async def let_go(self, queue: BrokerQueue) -> None:
        """Another proxy may consume it. Its channel is closed. Idempotent; never raises for the broker."""
        self._wanted.discard(queue)
        changing = self._changing.get(queue)
        if changing is None:
            return
        async with changing:
            session = self._held.pop(queue, None)
            if session is not None:
                try:
                    await _delete(session, queue)
                except BrokerUnavailable as error:  # then it ends with its connection
                    _log.info("a queue is let go with the connection", extra={"queue": queue, "why": error.detail})
        if queue not in self._wanted and not changing.locked():
            self._changing.pop(queue, None)


def _name(queue: BrokerQueue) -> str:
    name = PREFIX + queue
    return name if len(name.encode()) <= NAME_BYTES_MAX else PREFIX + sha1(queue.encode()).hexdigest()


async def _declare(session: Session, queue: BrokerQueue) -> bool:
    channel = await session.open_channel()
    try:
        declare = channel.queue_declare(_name(queue), exclusive=True)
        await session.call(declare, timeout=DECLARE_SECONDS_MAX)
    except ChannelRefusedError as error:
        if error.reason.code in _NOT_YET:
            return False
        raise BrokerUnavailable(f"RabbitMQ refuses the queue {_name(queue)}: {error}") from error
    except BaseException:
        session.lane.abort()  # it may come true after all, and nobody would ever let go of it
        raise
    finally:
        await session.close_channel(channel)
    return True


async def _delete(session: Session, queue: BrokerQueue) -> None:
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_delete(_name(queue)))
    except ChannelRefusedError as error:
        raise BrokerUnavailable(f"RabbitMQ does not delete the queue {_name(queue)}: {error}") from error
    finally:
        await session.close_channel(channel)
