"""Listens to announcements through Redis, on a connection of its own: a listening connection can't run commands."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from popgate.adapters.redis.address import close_pool, open_pool
from popgate.adapters.redis.connection import RedisConnection

QUIET_SECONDS = 5.0
"""Seconds of silence after which Redis is asked whether it is still there. If its machine is lost, or if it hangs while
a Sentinel chooses another one, the connection is not closed, and popgate would listen to it for hours."""
ANSWER_SECONDS = 2.0
AGAIN_SECONDS = 1.0


class ChangeSignal:
    """Wakes one waiting task when a channel announces a change. What changed has to be looked up."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._is_new = asyncio.Event()

    def notify(self) -> None:
        self._is_new.set()

    async def wait(self) -> None:
        """Return when there was an announcement since this last returned."""
        await self._is_new.wait()
        self._is_new.clear()


async def listen_for_changes(redis: RedisConnection, *signals: ChangeSignal) -> None:
    """Pass every message on a channel to its signal, and wake all of them when some may have been missed. Endless."""
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
            # The first message on each channel confirms the subscription: earlier announcements were not heard.
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
