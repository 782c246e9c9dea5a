"""The guard: popgates that share no state must not work on one virtual host, for each would lease the other's messages.

Theory of operation. The guard is an exchange that has its holder's name as an argument: RabbitMQ refuses to declare it
under another one. Each connection binds an exclusive queue of its own, which ends with the connection. So proxies of
one name hold the guard side by side, and others are kept out until the last of them has gone: whoever is refused
deletes an exchange to which nothing is bound. A popgate that was killed lets go at once; one whose host is gone, only
after RabbitMQ has missed its heartbeats. Exchanges are on every node of a cluster: none is missed.

Between the declaration and the binding the exchange may go, and come again as somebody else's: who has bound declares
once more, and holds the guard only if that is answered as before.

The exchange must not delete itself. RabbitMQ 4.3.6 can then keep a binding that comes in the same moment without the
exchange, and cannot recover the virtual host any more when a node starts (``{badrecord,undefined}``).
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
"""The one argument of exchanges that RabbitMQ compares. There is none of that name, nor anything to go there."""
RETRY_SECONDS = 0.5

_log = logging.getLogger(__name__)


class GuardHeldError(Exception):
    """Somebody of another name holds the guard."""


async def take_guard(session: Session, holder: str, *, wait_seconds: float, chance: random.Random) -> None:
    """Return once ``session`` holds the guard in the name of ``holder``; it holds it until it ends.

    Raises: GuardHeldError when others still have it after ``wait_seconds``; BrokerUnavailable.
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
                cleared = True  # it was left behind; where it comes again at once, others are about to take it
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
    """Whoever holds the guard could not let go of it while our queue is bound to it."""
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_delete(queue))
    except ChannelRefusedError as error:
        raise BrokerUnavailable(f"RabbitMQ does not delete the queue {queue}: {error}") from error
    finally:
        await session.close_channel(channel)


async def _delete_unused(session: Session) -> bool:
    """Whether it is gone: nothing was bound to it."""
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
