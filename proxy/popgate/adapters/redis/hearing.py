"""Hearing of what others tell through Redis, on a connection of its own: one that listens can't be asked anything."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from popgate.adapters.redis.address import close_pool, open_pool
from popgate.adapters.redis.connection import RedisConnection

QUIET_SECONDS = 5.0
"""Where nothing is told for so long, Redis is asked whether it is still there. Where its machine is lost, or it hangs
while a Sentinel chooses another one, nobody closes the connection, and it would be listened to for hours."""
ANSWER_SECONDS = 2.0
AGAIN_SECONDS = 1.0


class News:
    """Whether there is something new on a channel; what it is has to be looked up. For one who waits for it."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._is_new = asyncio.Event()

    def tell(self) -> None:
        self._is_new.set()

    async def heard(self) -> None:
        """Return when something was told since this returned last."""
        await self._is_new.wait()
        self._is_new.clear()


async def hear(redis: RedisConnection, *news: News) -> None:
    """Tell each of ``news`` of every message on its channel, and whenever some may have been missed. Endless."""
    pool = open_pool(redis.address)
    try:
        async with Redis.from_pool(pool) as client:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await _listen(client, {f"{redis.prefix}{one.channel}".encode(): one for one in news})
                await asyncio.sleep(AGAIN_SECONDS)
    finally:
        await close_pool(pool)


async def _listen(client: Redis, news: Mapping[bytes, News]) -> None:
    async with client.pubsub() as heard:  # pyright: ignore[reportUnknownMemberType]
        await heard.subscribe(*news)
        is_asked = False
        while True:
            # The first on each channel says that it is listened to from now on: what was told before was not heard.
            seconds = ANSWER_SECONDS if is_asked else QUIET_SECONDS
            message = cast("dict[str, Any] | None", await heard.get_message(timeout=seconds))
            if message is not None:
                is_asked = False
                if (one := news.get(message["channel"])) is not None:
                    one.tell()
            elif is_asked:
                raise TimeoutError("Redis does not answer")
            else:
                await heard.ping()  # pyright: ignore[reportUnknownMemberType]
                is_asked = True
