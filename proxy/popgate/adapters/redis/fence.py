"""A fenced write to Redis: one script compares the token of the last writer and sets the value."""

from typing import TYPE_CHECKING

from popgate.domain.errors import LockLost

if TYPE_CHECKING:  # a caller with a client has imported it; importing it takes as long as all else that locks need
    from redis.asyncio import Redis

# KEYS: the value, the highest token that has written it. ARGV: the new value, its writer's token.
# Tokens stay below 2^53, so that Lua's numbers hold them exactly.
_WRITE = """
local highest = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[2]) < highest then
    return redis.call('GET', KEYS[2])
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
return false
"""


class RedisFence:
    """Writes values that a lock protects; each keeps its highest token beside it (``{key}:token``)."""

    def __init__(self, redis: "Redis") -> None:
        self._write = redis.register_script(_WRITE)

    async def write(self, key: str, value: str | bytes, token: int) -> None:
        """Set ``key``. Raises: LockLost, if a later holder has written it."""
        highest = await self._write(keys=[key, f"{{{key}}}:token"], args=[value, token])
        if highest is not None:
            raise LockLost(f"token {token} is overtaken by {int(highest)}: its lock was handed on")
