"""The mark that prevents popgate's proxies and programs on RabbitMQ from consuming the same queue.

A proxy holds an exclusive queue beside every queue that it consumes, and waits while another connection has it. So this
program handles no message before it holds that queue: RabbitMQ may make it the active consumer while a proxy that has
cancelled its consumer still has leased messages. The names are those of ``popgate.adapters.rabbitmq.holds``.
"""

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha1

from aiormq.abc import AbstractChannel
from aiormq.exceptions import DeliveryError, PublishError
from pamqp.commands import Basic

from popgate_client.amqp.exclusive_names import ExclusiveNames, NameState, take_first
from popgate_client.amqp.session import NOT_FOUND, RESOURCE_LOCKED, ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable, Conflict

PREFIXES = ("popgate:consumer:", "popgate:consumer#1:", "popgate:consumer#2:", "popgate:consumer#3:")
"""Prefixes of the name and of its substitutes, which are used if the node of a holder is lost."""
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.03
PATIENCE_SECONDS = 2.0
"""Seconds to try to hold a queue: its previous consumer has released it, or its connection is just closing; a proxy
keeps it."""
TAKEN_PATIENCE_SECONDS = 20.0
"""Seconds to try if the queue is taken from another program, which must notice this first."""
LOST_LOOK_EVERY = 8
"""Every n-th attempt also checks whether the holder's node is lost, which is more expensive."""


def hold_names(queue: str) -> list[str]:
    """Return the name of the exclusive queue beside `queue`, and its substitutes."""
    names = [prefix + queue for prefix in PREFIXES]
    if len(names[-1].encode()) <= NAME_BYTES_MAX:
        return names
    return [prefix + sha1(queue.encode()).hexdigest() for prefix in PREFIXES]


async def hold(session: Session, queue: str, is_wanted: Callable[[], bool], *, patience_seconds: float) -> str | None:
    """Hold `queue` until `let_go` or the end of the session; return the name under which it is held, or None if it is
    no longer wanted.

    Don't cancel this: a declare that is under way may still succeed. Raises: Conflict if another connection keeps it;
    BrokerUnavailable.
    """
    deadline = asyncio.get_running_loop().time() + patience_seconds
    names = hold_names(queue) if session.server_version >= (4,) else hold_names(queue)[:1]
    tries = 0
    while is_wanted():
        looks = tries % LOST_LOOK_EVERY == 0
        name = await take_first(names, _Names(session), passes_over_lost=looks)
        if name is not None:
            return name
        tries += 1
        if asyncio.get_running_loop().time() > deadline:
            raise Conflict(
                "conflict",
                f"a popgate proxy consumes the queue {queue!r}: get its messages over HTTP, or stop the proxy",
            )
        await asyncio.sleep(RETRY_SECONDS)
    return None


async def let_go(session: Session, name: str) -> None:
    """Release a held queue. Never raises an error of the broker: if this fails, it ends the session, and the hold with
    it."""
    try:
        await _Names(session).delete(name)
    except (BrokerUnavailable, ChannelRefused) as error:
        session.end(f"the queue {name!r} could not be deleted: {error}")


class _Names:
    """Exclusive queues of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def declare(self, name: str) -> bool:
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_declare(name, exclusive=True))
        except ChannelRefused as error:
            if error.code in (RESOURCE_LOCKED, NOT_FOUND):  # the latter: on a node that is down
                return False
            raise BrokerUnavailable("broker_unavailable", f"RabbitMQ refuses the queue {name!r}: {error}") from error
        finally:
            await session.close_channel(channel)
        return True

    async def look(self, names: Sequence[str]) -> list[NameState]:
        """Return the state of each name, which a mandatory message finds out: RabbitMQ returns it if the queue does not
        exist, and rejects it if the node of a classic queue can't be reached."""
        channel = await self._session.open_channel(confirms=True)
        try:
            return list(await asyncio.gather(*(self._probed(channel, name) for name in names)))
        finally:
            await self._session.close_channel(channel)

    async def _probed(self, channel: AbstractChannel, name: str) -> NameState:
        properties = Basic.Properties(expiration="0")  # it must not stay in a queue that is alive
        publish = channel.basic_publish(b"", routing_key=name, mandatory=True, properties=properties)
        try:
            await self._session.call(publish)
        except PublishError:
            return NameState.FREE
        except DeliveryError:
            return NameState.LOST
        return NameState.ALIVE

    async def delete(self, name: str) -> None:
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_delete(name))
        finally:
            await session.close_channel(channel)


_conforms: type[ExclusiveNames] = _Names
