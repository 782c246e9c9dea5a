"""Lets only one proxy or program at a time consume a queue, even while the queue has no consumer at RabbitMQ.

Theory of operation. A single active consumer excludes other consumers only while it consumes. But popgate's consumers
pause, and they stop for a moment when their prefetch changes. Assume that a proxy is suspended at such a moment, and
another proxy replaces it. The suspended proxy still has unsettled messages from the front of the queue, so the new
consumer would deliver later messages first. Therefore each proxy declares an exclusive queue, its hold, for every queue
that it consumes. It declares the hold on the connection that consumes, so the hold ends when the connection and all
deliveries on it end. If a proxy stops consuming earlier, it closes its channel and then deletes the hold.

The name of the exclusive queue is derived from the name of the consumed queue, so no other component is needed to find
it. If the node of a holder is lost, a substitute name is used (``domain.exclusive_names``). Programs that consume
without a proxy (``popgate_client.amqp``) hold their queues in the same way.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import NamedTuple

from aiormq import spec
from aiormq.abc import AbstractChannel
from aiormq.exceptions import DeliveryError, PublishError

from popgate.adapters.rabbitmq.session import NOT_FOUND, RESOURCE_LOCKED, ChannelRefusedError, Session
from popgate.adapters.rabbitmq.versions import keeps_lost_exclusive_queues
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.exclusive_names import ExclusiveNames, NameState, take_first
from popgate.domain.names import BrokerQueue

_log = logging.getLogger(__name__)

PREFIXES = ("popgate:consumer:", "popgate:consumer#1:", "popgate:consumer#2:", "popgate:consumer#3:")
"""Prefixes of the exclusive queue's name and of its substitutes. With three substitutes, the nodes of up to three
holders may be lost at the same time."""
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.05
DECLARE_SECONDS_MAX = 300.0
"""Maximum number of seconds for a declaration: while a node hangs, RabbitMQ declares nothing until it considers this
node lost (``net_ticktime``)."""
LOST_LOOK_EVERY = 5
"""In each series of this many attempts, only the first attempt checks whether the present holder's node is lost. The
check is too expensive for every attempt."""
LOOK_SECONDS_MAX = 5.0
"""Maximum number of seconds that RabbitMQ may take to report the state of a name."""
_NOT_YET = (RESOURCE_LOCKED, NOT_FOUND)
"""Reply codes for a name that can't be declared yet. The name is in use, or it was in use on a node that is down, and
the other nodes have not detected this yet."""


class Hold(NamedTuple):
    """A queue that this process holds. ``name`` is the name of the exclusive queue, declared at the time ``taken_at``.

    ``lost_at`` is the time at which the former holder's node was found lost, or None if it was not lost. Both times are
    loop times.
    """

    session: Session
    name: str
    taken_at: float
    lost_at: float | None


class Holds:
    """The queues that this process holds on its consuming session.

    Checks that publish a message use ``publish_session``, because RabbitMQ stops reading a connection that publishes
    when RabbitMQ is low on memory.
    """

    def __init__(
        self, session: Callable[[], Session], publish_session: Callable[[], Session], *, chance: random.Random
    ) -> None:
        self._session = session
        self._publish_session = publish_session
        self._chance = chance
        self._wanted: set[BrokerQueue] = set()
        self._held: dict[BrokerQueue, Hold] = {}
        self._changing: dict[BrokerQueue, asyncio.Lock] = {}
        """A lock for each queue: RabbitMQ must receive the declaration and the deletion of a queue's hold in order."""

    async def take(self, queue: BrokerQueue) -> Hold:
        """Hold ``queue``, so that the session may consume it. Waits until no other proxy or program holds it.

        Raises: BrokerUnavailable, also if ``let_go`` is called during the wait.
        """
        self._wanted.add(queue)
        tries = 0
        while queue in self._wanted:
            async with self._changing.setdefault(queue, asyncio.Lock()):
                session = self._session()
                held = self._held.get(queue)
                if held is not None and held.session is session:
                    return held
                looks = tries % LOST_LOOK_EVERY == 0
                began = asyncio.get_running_loop().time()
                if queue in self._wanted and (name := await self._take(session, queue, looks=looks)) is not None:
                    now = asyncio.get_running_loop().time()
                    lost_at = began if name != hold_names(queue)[0] else None
                    held = self._held[queue] = Hold(session, name, now, lost_at)
                    return held
            tries += 1
            if tries == 1:
                _log.info("waiting until another proxy or program releases a queue", extra={"queue": queue})
            await asyncio.sleep(RETRY_SECONDS * self._chance.uniform(0.8, 1.2))
        raise BrokerUnavailable(f"this proxy may no longer consume queue {queue!r}")

    async def let_go(self, queue: BrokerQueue) -> None:
        """Release ``queue``, so that other proxies and programs may consume it. Idempotent.

        The channel that consumed the queue must be closed before. This method never raises an error of the broker.
        """
        self._wanted.discard(queue)
        changing = self._changing.get(queue)
        if changing is None:
            return
        async with changing:
            held = self._held.pop(queue, None)
            if held is not None:
                try:
                    await _Names(held.session, self._publish_session).delete(held.name)
                except BrokerUnavailable as error:  # in this case the hold ends with its connection
                    _log.info("a queue is released with the connection", extra={"queue": queue, "why": error.detail})
        if queue not in self._wanted and not changing.locked():
            self._changing.pop(queue, None)

    async def _take(self, session: Session, queue: BrokerQueue, *, looks: bool) -> str | None:
        """Return the name under which ``queue`` is held, or None if another proxy or program holds the queue.

        If ``looks`` is True, check whether the node of the holder is lost. Otherwise every holder is considered alive.
        """
        names = hold_names(queue)
        if not keeps_lost_exclusive_queues(session.server_version):
            names = names[:1]
        return await take_first(names, _Names(session, self._publish_session), passes_over_lost=looks)


def hold_names(queue: BrokerQueue) -> list[str]:
    """Return the name of the exclusive queue that holds ``queue``, followed by its substitutes."""
    names = [prefix + queue for prefix in PREFIXES]
    if len(names[-1].encode()) <= NAME_BYTES_MAX:
        return names
    return [prefix + sha1(queue.encode()).hexdigest() for prefix in PREFIXES]


class _Names:
    """Declares, checks and deletes exclusive queues on ``session``."""

    def __init__(self, session: Session, publish_session: Callable[[], Session]) -> None:
        self._session = session
        self._publish_session = publish_session

    async def declare(self, name: str) -> bool:
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_declare(name, exclusive=True), timeout=DECLARE_SECONDS_MAX)
        except ChannelRefusedError as error:
            if error.reason.code in _NOT_YET:
                return False
            raise BrokerUnavailable(f"RabbitMQ refuses the queue {name}: {error}") from error
        except BaseException:
            session.interceptor.abort()  # otherwise RabbitMQ may still declare the queue, and nothing would delete it
            raise
        finally:
            await session.close_channel(channel)
        return True

    async def look(self, names: Sequence[str]) -> list[NameState]:
        """Determine the state of each name by publishing a mandatory message to it.

        RabbitMQ returns the message if the name's queue does not exist, and refuses the message if the queue's node
        can't be reached. If publishing is not possible, passive declarations are used instead.
        """
        try:
            session = self._publish_session()
            if session.blocked is None:
                return await _look_by_publishing(session, names)
        except BrokerUnavailable:
            pass
        return [await self._look_by_declaring(name) for name in names]

    async def _look_by_declaring(self, name: str) -> NameState:
        """Determine the state of a name with a passive declaration.

        RabbitMQ needs a minute to answer for a queue on a lost node.
        """
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_declare(name, passive=True), timeout=LOOK_SECONDS_MAX)
        except ChannelRefusedError as error:
            return NameState.FREE if error.reason.code == NOT_FOUND else NameState.ALIVE
        finally:
            await session.close_channel(channel)
        return NameState.ALIVE

    async def delete(self, name: str) -> None:
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_delete(name))
        except ChannelRefusedError as error:
            raise BrokerUnavailable(f"RabbitMQ does not delete the queue {name}: {error}") from error
        finally:
            await session.close_channel(channel)


async def _look_by_publishing(session: Session, names: Sequence[str]) -> list[NameState]:
    """Return the state of each name. Raises: BrokerUnavailable."""
    channel = await session.open_channel(confirms=True)
    try:
        return list(await asyncio.gather(*(_probed(session, channel, name) for name in names)))
    finally:
        await session.close_channel(channel)


async def _probed(session: Session, channel: AbstractChannel, name: str) -> NameState:
    properties = spec.Basic.Properties(expiration="0")  # so that no message stays in the queue if its node is up
    publish = channel.basic_publish(b"", routing_key=name, mandatory=True, properties=properties)
    try:
        await session.call(publish, timeout=LOOK_SECONDS_MAX)
    except PublishError:
        return NameState.FREE
    except DeliveryError:
        return NameState.LOST
    return NameState.ALIVE


_conforms: type[ExclusiveNames] = _Names
