"""Rules about the version and the settings of Redis that endanger popgate's lease records."""

from collections.abc import Iterator, Mapping

from popgate.doctor.facts import RedisFacts
from popgate.doctor.findings import Finding, SetRedis, Severity

OLDEST = (5,)
"""Oldest supported version of Redis. In older versions, a script can't write after it has read the time."""


def redis_findings(redis: RedisFacts) -> list[Finding]:
    findings: list[Finding] = []
    if redis.version and redis.version < OLDEST:
        findings.append(
            Finding(
                code="redis-version",
                severity=Severity.ERROR,
                found=f"Redis at {redis.place} is version {'.'.join(map(str, redis.version))}",
                why="popgate's scripts need Redis 5 or newer",
                command="upgrade Redis",
            )
        )
    if redis.settings is not None:
        findings += _persistence(redis.place, redis.settings)
    return findings


def _persistence(place: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("cluster-enabled") == "yes":
        yield Finding(
            code="redis-cluster",
            severity=Severity.ERROR,
            found=f"Redis at {place} is a Redis Cluster",
            why="popgate's scripts use keys of several slots, and fail there",
            command="use a single Redis, or one behind Sentinels",
        )
    if settings.get("appendonly") != "yes":
        yield _setting(
            Severity.ERROR,
            "redis-append-only",
            f"Redis at {place} has no append-only file (appendonly {settings.get('appendonly')})",
            "a restart loses leases and acks, and their messages are redelivered",
            SetRedis(name="appendonly", value="yes"),
        )
    elif (sync := settings.get("appendfsync")) != "always":
        found = f"Redis at {place} answers before it has written to disk (appendfsync {sync})"
        why = (
            "if Redis or its machine fails, leases and acks of the last seconds are lost, and their messages are "
            "redelivered"
        )
        severity = Severity.INFO if sync == "everysec" else Severity.WARNING
        yield _setting(severity, "redis-append-sync", found, why, SetRedis(name="appendfsync", value="always"))
    if (policy := settings.get("maxmemory-policy")) != "noeviction":
        yield _setting(
            Severity.ERROR,
            "redis-eviction",
            f"Redis at {place} may evict lease records when its memory is full (maxmemory-policy {policy})",
            "an evicted lease or ack is lost, and its message is redelivered",
            SetRedis(name="maxmemory-policy", value="noeviction"),
        )


def _setting(severity: Severity, code: str, found: str, why: str, fix: SetRedis) -> Finding:
    return Finding(code=code, severity=severity, found=found, why=why, command=fix.command, fix=fix)
