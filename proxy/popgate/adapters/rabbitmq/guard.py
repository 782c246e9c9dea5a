"""Prevents popgate processes that share no state from using the same virtual host.

Without the guard, each of these processes would lease messages that another one is processing.

Theory of operation. The guard is an exchange that has its holder's name as an argument. If the guard exists, RabbitMQ
refuses to declare it with another holder's name. Each connection also binds an exclusive queue to the guard, and
RabbitMQ deletes this queue when the connection ends. Several proxies with the same holder's name can hold the guard
together. They exclude proxies with another name until the last of them has ended. A proxy that is refused deletes the
exchange if nothing is bound to it, and then takes the guard. A process that is killed releases the guard at once. If a
proxy's host is lost, the guard is released only after the proxy has missed its heartbeats. Exchanges exist on every
node of a cluster, so it does not matter which node a proxy uses.

Only one connection at a time may carry out these steps: the connection that has declared an exclusive queue called the
turn. The reason is that RabbitMQ binds in two steps, and 4.3.6 accepts a binding to an exchange that is deleted at the
same moment. Without the turn, processes with two names held the guard at the same time, the next deletion crashed its
channel (``function_clause`` in ``conditional_delete_in_khepri``), and a node that restarted could not recover the
virtual host (``{badrecord,undefined}``). For the same reason, the exchange must not be an auto-delete exchange.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from aiormq.abc import AbstractChannel, FieldTable

from popgate.adapters.rabbitmq.session import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    RESOURCE_LOCKED,
    ChannelRefusedError,
    Session,
)
from popgate.domain.errors import BrokerUnavailable

GUARD = "popgate:guard"
TURN = f"{GUARD}:turn"
HOLDER = "alternate-exchange"
"""The argument of the guard that contains the holder's name, because RabbitMQ compares no other argument of exchanges.
There is no exchange with this name, so RabbitMQ routes no message to it."""
RETRY_SECONDS = 0.5
TURN_RETRY_SECONDS = 0.05
TURN_SECONDS = 20.0
"""Maximum number of seconds to wait for the turn. A turn takes some milliseconds. If its connection is lost in that
time, RabbitMQ notices this after two heartbeats."""

_log = logging.getLogger(__name__)


class GuardHeldError(Exception):
    """A popgate process with another name holds the guard."""


async def take_guard(session: Session, holder: str, *, wait_seconds: float, chance: random.Random) -> None:
    """Wait until ``session`` holds the guard in the name of ``holder``. The session holds the guard until it ends.

    Raises: GuardHeldError if a process with another name still holds the guard after ``wait_seconds``;
    BrokerUnavailable.
    """
    deadline = asyncio.get_running_loop().time() + wait_seconds
    told = False
    while True:
        async with _turn(session, chance):
            if await _take(session, holder):
                return
        if asyncio.get_running_loop().time() >= deadline:
            raise GuardHeldError
        if not told:
            told = True
            _log.info("another popgate holds the guard; waiting", extra={"wait_seconds": wait_seconds})
        await asyncio.sleep(RETRY_SECONDS * chance.uniform(0.8, 1.2))


@contextlib.asynccontextmanager
async def _turn(session: Session, chance: random.Random) -> AsyncGenerator[None]:
    """Hold the turn while the block runs. Raises: BrokerUnavailable."""
    deadline = asyncio.get_running_loop().time() + TURN_SECONDS
    while not await _begin_turn(session):
        if asyncio.get_running_loop().time() >= deadline:
            raise BrokerUnavailable(f"another connection has kept the queue {TURN} for {TURN_SECONDS:g} s")
        await asyncio.sleep(TURN_RETRY_SECONDS * chance.uniform(0.5, 1.5))
    try:
        yield
    finally:
        await _end_turn(session)


async def _begin_turn(session: Session) -> bool:
    return await _accepts(
        session,
        lambda channel: channel.queue_declare(TURN, exclusive=True),
        unless=(RESOURCE_LOCKED, NOT_FOUND),  # not found: the node of the turn's holder has just failed
    )


async def _end_turn(session: Session) -> None:
    await _accepts(session, lambda channel: channel.queue_delete(TURN))


async def _take(session: Session, holder: str) -> bool:
    """Take the guard unless a process with another name holds it. Return whether ``session`` now holds the guard."""
    if not await _declare(session, holder) and not (await _delete_unused(session) and await _declare(session, holder)):
        return False
    queue = f"{GUARD}:{secrets.token_hex(8)}"
    await _accepts(session, lambda channel: channel.queue_declare(queue, exclusive=True))
    await _accepts(session, lambda channel: channel.queue_bind(queue, GUARD))
    return True


async def _declare(session: Session, holder: str) -> bool:
    """Declare the guard in the name of ``holder``. Return False if it exists with another holder's name."""
    arguments: FieldTable = {HOLDER: f"{GUARD}:{holder}"}
    return await _accepts(
        session,
        lambda channel: channel.exchange_declare(GUARD, exchange_type="fanout", arguments=arguments),
        unless=(PRECONDITION_FAILED,),
    )


async def _delete_unused(session: Session) -> bool:
    """Delete the guard if nothing is bound to it. Return False if something is bound to it."""
    return await _accepts(
        session, lambda channel: channel.exchange_delete(GUARD, if_unused=True), unless=(PRECONDITION_FAILED,)
    )


async def _accepts(
    session: Session, call: Callable[[AbstractChannel], Coroutine[Any, Any, object]], *, unless: tuple[int, ...] = ()
) -> bool:
    """Make a call on a new channel. Return False if RabbitMQ refuses the call with a code of ``unless``.

    Raises: BrokerUnavailable if RabbitMQ refuses it with another code.
    """
    channel = await session.open_channel()
    try:
        await session.call(call(channel))
    except ChannelRefusedError as error:
        if error.reason.code not in unless:
            raise BrokerUnavailable(f"RabbitMQ refuses what popgate needs for its guard: {error}") from error
        return False
    finally:
        await session.close_channel(channel)
    return True
