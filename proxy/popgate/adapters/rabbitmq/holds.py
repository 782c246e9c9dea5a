"""Who may consume a queue: one at a time, also while RabbitMQ has no consumer of the one who may.

Theory of operation. A single active consumer keeps others waiting only while it consumes, and popgate's consumers
pause, and stop for a moment where a prefetch changes. A proxy that was stopped just then, and overtaken, still has
messages that belong in front of all others; whoever consumed now would hand out what comes behind them. So each proxy
holds an exclusive queue beside every queue that it consumes, on the same connection. It ends with that connection, as
everything does that RabbitMQ has delivered there, or when the proxy has closed its channel and lets go.

The name says whose place is taken: it is the queue's own, so nobody else has to be asked. It has substitutes for where
the node of its holder is lost (``domain.exclusive_names``). Programs that consume without a proxy
(``popgate_client.amqp``) hold the queues that they work on in the same way.
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
"""Of the name and its substitutes: so many nodes may be lost at a time, and one more holder be found."""
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.05
DECLARE_SECONDS_MAX = 300.0
"""While a node hangs RabbitMQ declares nothing until it has given that one up (``net_ticktime``), and then it does."""
LOST_LOOK_EVERY = 5
"""At the first of so many attempts it is asked whether the node of the present holder is lost: that costs more."""
LOOK_SECONDS_MAX = 5.0
"""How long RabbitMQ may take to say who has a name."""
_NOT_YET = (RESOURCE_LOCKED, NOT_FOUND)
"""Somebody has it; or had it on a node that is down, which the others have yet to find out."""


class Hold(NamedTuple):
    """``lost_at``: when, by the loop's clock, it was found that the node of the former holder is lost, if it is."""

    session: Session
    name: str
    taken_at: float
    lost_at: float | None


class Holds:
    """What this process holds on the session that it consumes on. ``publish_session`` is for questions that are asked
    by publishing: RabbitMQ stops reading a connection that publishes while it is low on memory."""

    def __init__(
        self, session: Callable[[], Session], publish_session: Callable[[], Session], *, chance: random.Random
    ) -> None:
        self._session = session
        self._publish_session = publish_session
        self._chance = chance
        self._wanted: set[BrokerQueue] = set()
        self._held: dict[BrokerQueue, Hold] = {}
        self._changing: dict[BrokerQueue, asyncio.Lock] = {}
        """While one of a queue is declared or deleted: the two must not overtake one another at RabbitMQ."""

    async def take(self, queue: BrokerQueue) -> Hold:
        """Hold ``queue``, which may be consumed on that session; waits until nobody else holds it.

        Raises: BrokerUnavailable, also when it is let go meanwhile.
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
            held = self._held.pop(queue, None)
            if held is not None:
                try:
                    await _Names(held.session, self._publish_session).delete(held.name)
                except BrokerUnavailable as error:  # then it ends with its connection
                    _log.info("a queue is let go with the connection", extra={"queue": queue, "why": error.detail})
        if queue not in self._wanted and not changing.locked():
            self._changing.pop(queue, None)

    async def _take(self, session: Session, queue: BrokerQueue, *, looks: bool) -> str | None:
        """The name by which ``queue`` is held from now on; None where another proxy or program holds it.

        ``looks``: for holders whose node is lost. Without it they are taken for others that live.
        """
        names = hold_names(queue)
        if not keeps_lost_exclusive_queues(session.server_version):
            names = names[:1]
        return await take_first(names, _Names(session, self._publish_session), passes_over_lost=looks)


def hold_names(queue: BrokerQueue) -> list[str]:
    """What the exclusive queue beside ``queue`` is called, and its substitutes."""
    names = [prefix + queue for prefix in PREFIXES]
    if len(names[-1].encode()) <= NAME_BYTES_MAX:
        return names
    return [prefix + sha1(queue.encode()).hexdigest() for prefix in PREFIXES]


class _Names:
    """Exclusive queues of ``session``."""

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
            session.lane.abort()  # it may come true after all, and nobody would ever let go of it
            raise
        finally:
            await session.close_channel(channel)
        return True

    async def look(self, names: Sequence[str]) -> list[NameState]:
        """A mandatory message finds out: it comes back where there is no such queue, and a classic queue whose node
        can't be reached refuses it."""
        try:
            session = self._publish_session()
            if session.blocked is None:
                return await _look_by_publishing(session, names)
        except BrokerUnavailable:
            pass
        return [await self._look_by_declaring(name) for name in names]

    async def _look_by_declaring(self, name: str) -> NameState:
        """Of a queue on a lost node RabbitMQ says nothing for a minute."""
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
    """Raises: BrokerUnavailable."""
    channel = await session.open_channel(confirms=True)
    try:
        return list(await asyncio.gather(*(_probed(session, channel, name) for name in names)))
    finally:
        await session.close_channel(channel)


async def _probed(session: Session, channel: AbstractChannel, name: str) -> NameState:
    properties = spec.Basic.Properties(expiration="0")  # where its node is there, nothing is to stay in it
    publish = channel.basic_publish(b"", routing_key=name, mandatory=True, properties=properties)
    try:
        await session.call(publish, timeout=LOOK_SECONDS_MAX)
    except PublishError:
        return NameState.FREE
    except DeliveryError:
        return NameState.LOST
    return NameState.ALIVE


_conforms: type[ExclusiveNames] = _Names
