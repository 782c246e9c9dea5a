"""The mark that keeps popgate's proxies and programs on bare RabbitMQ off each other's queues.

A proxy holds an exclusive queue beside every queue that it consumes, and waits while somebody else has it. So nothing
is handled here before this program holds it: RabbitMQ may make us the active consumer while a proxy that let its
consumer rest still has messages out on lease. The names are those of ``popgate.adapters.rabbitmq.holds``.
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
"""Of the name and its substitutes, for where the node of a holder is lost."""
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.03
PATIENCE_SECONDS = 2.0
"""Who consumed before us has let go of it already, or its connection is just being closed; a proxy keeps it."""
TAKEN_PATIENCE_SECONDS = 20.0
"""The same where a queue is taken from another program: that one must see so first."""
LOST_LOOK_EVERY = 8
"""At the first of so many attempts it is asked whether the node of the present holder is lost: that costs more."""


def hold_names(queue: str) -> list[str]:
    """What the exclusive queue beside `queue` is called, and its substitutes."""
    names = [prefix + queue for prefix in PREFIXES]
    if len(names[-1].encode()) <= NAME_BYTES_MAX:
        return names
    return [prefix + sha1(queue.encode()).hexdigest() for prefix in PREFIXES]


async def hold(session: Session, queue: str, is_wanted: Callable[[], bool], *, patience_seconds: float) -> str | None:
    """Hold `queue`, under the name that is returned, until `let_go` or the end of the session; None where it is not
    wanted any longer.

    Not to be cancelled: a declare that is under way may come true. Raises: Conflict when somebody else keeps it;
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
    """Others may have it. Never raises for the broker: it ends with the connection in any case."""
    try:
        await _Names(session).delete(name)
    except (BrokerUnavailable, ChannelRefused) as error:
        session.end(f"the queue {name!r} could not be deleted: {error}")


class _Names:
    """Exclusive queues of this session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def declare(self, name: str) -> bool:
        session = self._session
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_declare(name, exclusive=True))
        except ChannelRefused as error:
            if error.code in (RESOURCE_LOCKED, NOT_FOUND):  # or it was on a node that is down
                return False
            raise BrokerUnavailable("broker_unavailable", f"RabbitMQ refuses the queue {name!r}: {error}") from error
        finally:
            await session.close_channel(channel)
        return True

    async def look(self, names: Sequence[str]) -> list[NameState]:
        """A mandatory message finds out: it comes back where there is no such queue, and a classic queue whose node
        can't be reached refuses it."""
        channel = await self._session.open_channel(confirms=True)
        try:
            return list(await asyncio.gather(*(self._probed(channel, name) for name in names)))
        finally:
            await self._session.close_channel(channel)

    async def _probed(self, channel: AbstractChannel, name: str) -> NameState:
        properties = Basic.Properties(expiration="0")  # where its node is there, nothing is to stay in it
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
