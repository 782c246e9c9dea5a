"""Hearing of what others tell through Redis, on a connection of its own: one that listens can't be asked anything."""

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from popgate.adapters.redis.address import close_pool, open_pool
from popgate.adapters.redis.connection import RedisConnection

QUIET_SECONDS = 60.0
AGAIN_SECONDS = 1.0


async def hear(redis: RedisConnection, channel: str, tell: Callable[[], None]) -> None:
    """Call ``tell`` for every message on the channel, and whenever some may have been missed. Endless."""
    pool = open_pool(redis.address)
    try:
        async with Redis.from_pool(pool) as client:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await _listen(client, redis.prefix + channel, tell)
                await asyncio.sleep(AGAIN_SECONDS)
    finally:
        await close_pool(pool)


async def _listen(client: Redis, channel: str, tell: Callable[[], None]) -> None:
    async with client.pubsub(ignore_subscribe_messages=True) as heard:  # pyright: ignore[reportUnknownMemberType]
        await heard.subscribe(channel)
        tell()  # what was told before was not heard
        while True:
            if await heard.get_message(timeout=QUIET_SECONDS) is not None:
                tell()
