"""Checks the configuration of Redis when popgate starts. ``popgate doctor`` makes the same checks.

A failed check does not prevent the start. It returns a warning for the operator that says what to do.
"""

import re
from collections.abc import Sequence

from popgate.adapters.redis.connection import RedisConnection

SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy", "cluster-enabled")


async def redis_settings(redis: RedisConnection) -> dict[str, str] | None:
    """Return the settings that affect popgate, or None if this user may not read them. Raises: StateUnavailable."""
    settings: dict[str, str] = {}
    for name in SETTINGS:
        value = await _setting(redis, name)
        if value is None:
            return None
        settings[name] = value
    return settings


async def redis_version(redis: RedisConnection) -> tuple[int, ...]:
    """Return the version of Redis, or an empty tuple if Redis does not report it. Raises: StateUnavailable."""
    told: bytes = await redis.look("INFO", "server") or b""
    found = re.search(r"^redis_version:([\d.]+)", told.decode(errors="replace"), re.MULTILINE)
    return tuple(int(part) for part in found[1].split(".") if part) if found else ()


async def startup_warnings(redis: RedisConnection) -> list[str]:
    """Return warnings about a Redis configuration that endangers records or can't be read. Raises: StateUnavailable."""
    settings = await redis_settings(redis)
    if settings is None:
        unseen = (
            f"Redis at {redis.place} does not let popgate see its configuration (CONFIG GET): make sure yourself that "
            "appendonly is yes, appendfsync is always and maxmemory-policy is noeviction"
        )
        return [unseen]
    warnings: list[str] = []
    if settings["appendonly"] != "yes":
        warnings.append(
            f"Redis at {redis.place} has no append-only file: a restart loses leases and acks, and messages are "
            "delivered again; set appendonly yes"
        )
    elif (sync := settings["appendfsync"]) != "always":
        warnings.append(
            f"Redis at {redis.place} answers before it has written to disk (appendfsync {sync}): when it or its "
            "machine dies, leases and acks of the last seconds are lost, and messages are delivered again; "
            "set appendfsync always"
        )
    if (policy := settings["maxmemory-policy"]) != "noeviction":
        warnings.append(
            f"Redis at {redis.place} may evict lease records when its memory is full (maxmemory-policy {policy}), and "
            "messages are delivered again; set maxmemory-policy noeviction"
        )
    if settings["cluster-enabled"] == "yes":
        warnings.append(
            f"Redis at {redis.place} is a Redis Cluster, where popgate's scripts fail: use a single Redis or Sentinel"
        )
    return warnings


async def left_secret_warnings(redis: RedisConnection, secrets: Sequence[bytes]) -> list[str]:
    """Return a warning if Redis still holds the secret that earlier versions of popgate stored there.

    ``secrets`` are those of this proxy. Raises: StateUnavailable.
    """
    key = f"{redis.prefix}secret"
    left: bytes | None = await redis.command("GET", key)
    if left is None:
        return []
    if left in secrets:
        return [f"Redis at {redis.place} still holds a secret of earlier versions of popgate: delete the key {key}"]
    remedy = "if messages of these versions may still be on RabbitMQ, append its value to --secret-file; then delete it"
    return [f"Redis at {redis.place} holds a secret of earlier versions of popgate in the key {key}: {remedy}"]


async def _setting(redis: RedisConnection, name: str) -> str | None:
    """Return the value of a Redis setting, or None if this user may not read it."""
    answer: list[bytes] | None = await redis.look("CONFIG", "GET", name)
    if answer is None:
        return None
    return answer[1].decode() if answer else ""
