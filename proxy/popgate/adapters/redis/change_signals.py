"""Receives announcements of changes through Redis pub/sub.

A separate connection is necessary, because a connection that listens can't run other commands.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from popgate.adapters.redis.address import close_pool, open_pool
from popgate.adapters.redis.connection import RedisConnection

QUIET_SECONDS = 5.0
"""Seconds without a message after which popgate sends a ping to Redis. If the machine of Redis is lost, or if Redis
hangs while the Sentinels choose another master, the connection stays open, and popgate would listen on it for hours."""
ANSWER_SECONDS = 2.0
AGAIN_SECONDS = 1.0


class ChangeSignal:
    """Wakes one waiting task when ``channel`` announces a change. The task must find out what has changed."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._is_new = asyncio.Event()

    def notify(self) -> None:
        self._is_new.set()

    async def wait(self) -> None:
        """Wait until a change has been announced since the previous call returned. Only one task may wait at a time."""
        await self._is_new.wait()
        self._is_new.clear()


async def listen_for_changes(redis: RedisConnection, *signals: ChangeSignal) -> None:
    """Notify each signal whenever its channel announces a change. Never returns.

    After a new subscription, all signals are notified, because announcements may have been missed before.
    """
    pool = open_pool(redis.address)
    try:
        async with Redis.from_pool(pool) as client:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await _listen(client, {f"{redis.prefix}{one.channel}".encode(): one for one in signals})
                await asyncio.sleep(AGAIN_SECONDS)
    finally:
        await close_pool(pool)


async def _listen(client: Redis, signals: Mapping[bytes, ChangeSignal]) -> None:
    async with client.pubsub() as heard:  # pyright: ignore[reportUnknownMemberType]
        await heard.subscribe(*signals)
        is_asked = False
        while True:
            # The first message on each channel confirms the subscription. It also notifies the signal, because earlier
            # announcements may have been missed.
            seconds = ANSWER_SECONDS if is_asked else QUIET_SECONDS
            message = cast("dict[str, Any] | None", await heard.get_message(timeout=seconds))
            if message is not None:
                is_asked = False
                if (one := signals.get(message["channel"])) is not None:
                    one.notify()
            elif is_asked:
                raise TimeoutError("Redis does not answer")
            else:
                await heard.ping()  # pyright: ignore[reportUnknownMemberType]
                is_asked = True
