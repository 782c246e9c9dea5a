"""The resource's side of a lock: a client that has lost the lock is refused."""

import pytest
import redis.asyncio as redis

from popgate.amqp_locks import Fence, LockLost, RedisFence
from support.redis import RedisServer


def test_a_resource_that_is_a_process_refuses_lower_tokens() -> None:
    fence = Fence()
    for token in (3, 3, 7):
        fence.admit(token)
    with pytest.raises(LockLost, match="token 6 is overtaken by 7"):
        fence.admit(6)
    fence.admit(7)


async def test_a_value_in_redis_keeps_what_the_latest_holder_wrote(redis_server: RedisServer) -> None:
    async with redis.Redis(port=redis_server.port, db=15) as client:
        fence = RedisFence(client)
        large = 2**53 - 10
        await fence.write("fence-report", "of the first", large)
        await fence.write("fence-report", b"of the first, once more", large)
        await fence.write("fence-report", "of the second", large + 1)
        with pytest.raises(LockLost, match=f"token {large} is overtaken by {large + 1}"):
            await fence.write("fence-report", "of the first, who slept", large)
        assert await client.get("fence-report") == b"of the second"
        await fence.write("fence-another", "has its own", 1)
