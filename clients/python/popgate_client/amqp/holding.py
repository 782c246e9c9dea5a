"""The mark that keeps popgate's proxies and programs on bare RabbitMQ off each other's queues.

A proxy holds an exclusive queue beside every queue that it consumes, and waits while somebody else has it. So nothing
is handled here before this program holds it: RabbitMQ may make us the active consumer while a proxy that let its
consumer rest still has messages out on lease. The name is that of ``popgate.adapters.rabbitmq.holds``.
"""

import asyncio
from collections.abc import Callable
from hashlib import sha1

from popgate_client.amqp.session import NOT_FOUND, RESOURCE_LOCKED, ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable, Conflict

PREFIX = "popgate:consumer:"
NAME_BYTES_MAX = 255
RETRY_SECONDS = 0.03
PATIENCE_SECONDS = 2.0
"""Who consumed before us has let go of it already, or its connection is just being closed; a proxy keeps it."""
TAKEN_PATIENCE_SECONDS = 20.0
"""The same where a queue is taken from another program: that one must see so first."""


def hold_name(queue: str) -> str:
    """What the exclusive queue beside `queue` is called."""
    name = PREFIX + queue
    return name if len(name.encode()) <= NAME_BYTES_MAX else PREFIX + sha1(queue.encode()).hexdigest()


async def hold(session: Session, queue: str, is_wanted: Callable[[], bool], *, patience_seconds: float) -> bool:
    """Hold `queue` until `let_go` or the end of the session; False where it is not wanted any longer.

    Not to be cancelled: a declare that is under way may come true. Raises: Conflict when somebody else keeps it;
    BrokerUnavailable.
    """
    deadline = asyncio.get_running_loop().time() + patience_seconds
    while is_wanted():
        if await _declare(session, queue):
            return True
        if asyncio.get_running_loop().time() > deadline:
            raise Conflict(
                "conflict",
                f"a popgate proxy consumes the queue {queue!r}: get its messages over HTTP, or stop the proxy",
            )
        await asyncio.sleep(RETRY_SECONDS)
    return False


async def let_go(session: Session, queue: str) -> None:
    """Others may have it. Never raises for the broker: it ends with the connection in any case."""
    try:
        channel = await session.open_channel()
        try:
            await session.call(channel.queue_delete(hold_name(queue)))
        finally:
            await session.close_channel(channel)
    except (BrokerUnavailable, ChannelRefused) as error:
        session.end(f"the queue {hold_name(queue)!r} could not be deleted: {error}")


async def _declare(session: Session, queue: str) -> bool:
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_declare(hold_name(queue), exclusive=True))
    except ChannelRefused as error:
        if error.code in (RESOURCE_LOCKED, NOT_FOUND):  # or it was on a node that is down
            return False
        raise BrokerUnavailable(
            "broker_unavailable", f"RabbitMQ refuses the queue {hold_name(queue)!r}: {error}"
        ) from error
    finally:
        await session.close_channel(channel)
    return True
