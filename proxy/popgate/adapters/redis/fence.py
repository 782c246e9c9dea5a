"""Writes to Redis with fencing tokens: one script sets a value, unless an earlier write had a higher token."""

from typing import TYPE_CHECKING

from popgate.domain.errors import LockLost

if TYPE_CHECKING:  # the caller has imported redis; importing it takes as long as all other imports that locks need
    from redis.asyncio import Redis

# KEYS: the keys of the value, and of the highest token with which it was written. ARGV: the new value, and the token.
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
    """Writes values that a lock protects. Redis stores the highest token of each value under ``{key}:token``."""

    def __init__(self, redis: "Redis") -> None:
        self._write = redis.register_script(_WRITE)

    async def write(self, key: str, value: str | bytes, token: int) -> None:
        """Set ``key`` to ``value``. Raises: LockLost if ``key`` was already written with a higher token."""
        highest = await self._write(keys=[key, f"{{{key}}}:token"], args=[value, token])
        if highest is not None:
            raise LockLost(f"token {token} is overtaken by {int(highest)}: its lock was handed on")
