"""The guard: popgates that share no state must not work on one virtual host, because each would lease the other's
messages.

Theory of operation. The guard is an exchange that has its holder's name as an argument: RabbitMQ refuses to declare it
with another one. Each connection binds an exclusive queue of its own, which ends with the connection. So proxies with
the same name hold the guard side by side, and keep others out until the last of them has gone: a popgate that is
refused deletes the exchange if nothing is bound to it. A popgate that was killed releases the guard at once; if its
host is gone, only after RabbitMQ has missed its heartbeats. Exchanges exist on every node of a cluster, so it does not
matter which node a proxy uses.

Between declaration and binding, another popgate may delete the exchange and declare it under its own name. So after the
binding each popgate declares once more, and holds the guard only if RabbitMQ accepts that, too.

The exchange must not delete itself. RabbitMQ 4.3.6 can then keep a binding that arrives at the same moment without the
exchange, and cannot recover the virtual host when a node starts (``{badrecord,undefined}``).
"""

import asyncio
import logging
import random
import secrets

from aiormq.abc import AbstractChannel, FieldTable

from popgate.adapters.rabbitmq.session import NOT_FOUND, PRECONDITION_FAILED, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable

GUARD = "popgate:guard"
HOLDER = "alternate-exchange"
"""The only exchange argument that RabbitMQ compares. No exchange of that name exists, and no message would go there."""
RETRY_SECONDS = 0.5

_log = logging.getLogger(__name__)


class GuardHeldError(Exception):
    """A popgate with another name holds the guard."""


async def take_guard(session: Session, holder: str, *, wait_seconds: float, chance: random.Random) -> None:
    """Return once ``session`` holds the guard in the name of ``holder``. It holds it until it ends.

    Raises: GuardHeldError if another popgate still holds it after ``wait_seconds``; BrokerUnavailable.
    """
    deadline = asyncio.get_running_loop().time() + wait_seconds
    queue = f"{GUARD}:{secrets.token_hex(8)}"
    cleared = told = False
    while True:
        try:
            await _take(session, queue, holder)
        except ChannelRefusedError as error:
            if error.reason.code not in (PRECONDITION_FAILED, NOT_FOUND):
                raise BrokerUnavailable(f"RabbitMQ refuses the exchange {GUARD}: {error}") from error
            await _let_go(session, queue)
            if await _delete_unused(session) and not cleared:
                cleared = True  # it was left over; if it is there again at once, others are about to take it
                continue
            if asyncio.get_running_loop().time() >= deadline:
                raise GuardHeldError from error
        else:
            return
        if not told:
            told = True
            _log.info("another popgate holds the guard; waiting", extra={"wait_seconds": wait_seconds})
        await asyncio.sleep(RETRY_SECONDS * chance.uniform(0.8, 1.2))


async def _take(session: Session, queue: str, holder: str) -> None:
    channel = await session.open_channel()
    try:
        await _declare(session, channel, holder)
        await session.call(channel.queue_declare(queue, exclusive=True))
        await session.call(channel.queue_bind(queue, GUARD))
        await _declare(session, channel, holder)
    finally:
        await session.close_channel(channel)


async def _declare(session: Session, channel: AbstractChannel, holder: str) -> None:
    arguments: FieldTable = {HOLDER: f"{GUARD}:{holder}"}
    await session.call(channel.exchange_declare(GUARD, exchange_type="fanout", arguments=arguments))


async def _let_go(session: Session, queue: str) -> None:
    """Delete our queue: its binding would keep the exchange in use after its holder has gone."""
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_delete(queue))
    except ChannelRefusedError as error:
        raise BrokerUnavailable(f"RabbitMQ does not delete the queue {queue}: {error}") from error
    finally:
        await session.close_channel(channel)


async def _delete_unused(session: Session) -> bool:
    """Delete the guard if nothing is bound to it. Return whether it is gone."""
    channel = await session.open_channel()
    try:
        await session.call(channel.exchange_delete(GUARD, if_unused=True))
    except ChannelRefusedError as error:
        if error.reason.code != PRECONDITION_FAILED:  # it is in use
            raise BrokerUnavailable(f"RabbitMQ does not delete the exchange {GUARD}: {error}") from error
        return False
    finally:
        await session.close_channel(channel)
    return True
