"""What is looked at in Redis before popgate trusts it with its records.

Nothing here stops popgate: a warning is a sentence for the operator, and says what to do.
"""

from popgate.adapters.redis.connection import RedisConnection


async def startup_warnings(redis: RedisConnection) -> list[str]:
    """What of Redis's configuration puts records at risk, or may not be looked at. Raises: StateUnavailable."""
    append_only = await _setting(redis, "appendonly")
    policy = await _setting(redis, "maxmemory-policy")
    if append_only is None or policy is None:
        unseen = (
            f"Redis at {redis.place} does not let popgate see its configuration (CONFIG GET): make sure yourself that "
            "appendonly is yes, appendfsync is always and maxmemory-policy is noeviction"
        )
        return [unseen]
    warnings: list[str] = []
    if append_only != "yes":
        warnings.append(
            f"Redis at {redis.place} has no append-only file: a restart forgets leases and acks, and messages come "
            "again; set appendonly yes"
        )
    elif (sync := await _setting(redis, "appendfsync")) != "always":
        warnings.append(
            f"Redis at {redis.place} answers before it has written to disk (appendfsync {sync}): when it or its "
            "machine dies, leases and acks of the last seconds are forgotten, and messages come again; set "
            "appendfsync always"
        )
    if policy != "noeviction":
        warnings.append(
            f"Redis at {redis.place} may evict lease records when its memory is full (maxmemory-policy {policy}), and "
            "messages come again; set maxmemory-policy noeviction"
        )
    if await _setting(redis, "cluster-enabled") == "yes":
        warnings.append(
            f"Redis at {redis.place} is a Redis Cluster, where popgate's scripts fail: use a single Redis or Sentinel"
        )
    return warnings


async def _setting(redis: RedisConnection, name: str) -> str | None:
    """The value of a setting; None where it can't be seen."""
    answer: list[bytes] | None = await redis.look("CONFIG", "GET", name)
    if answer is None:
        return None
    return answer[1].decode() if answer else ""
