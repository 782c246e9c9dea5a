"""Reads facts for the doctor from Redis."""

import time

from popgate.adapters.doctor.broker_api import skew_seconds
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.startup import redis_settings, redis_version
from popgate.doctor.facts import ClockSkew, RedisFacts


async def redis_facts(redis: RedisConnection) -> tuple[RedisFacts, ClockSkew]:
    """Return the facts about Redis, and how much its clock differs from this machine's. Raises: StateUnavailable."""
    before = time.time()
    told: list[bytes] = await redis.command("TIME")
    after = time.time()
    shown = int(told[0]) + int(told[1]) / 1_000_000
    facts = RedisFacts(place=redis.place, version=await redis_version(redis), settings=await redis_settings(redis))
    return facts, ClockSkew(place=f"Redis at {redis.place}", seconds=skew_seconds(before, after, shown, shown))
