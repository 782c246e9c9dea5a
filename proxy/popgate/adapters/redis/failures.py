"""Translates Redis's errors into texts that tell an operator why the state can't be read or written, and what to do.

If an error has no translation, popgate's own call is at fault. The caller raises such an error unchanged.
"""

from redis import exceptions as redis
from redis.sentinel import MasterNotFoundError

from popgate.domain.errors import StateUnavailable

RETRY_AFTER_SECONDS = 1.0
REMEDY_SECONDS = 5.0
"""Seconds after which clients should retry if an operator must act first."""


def state_failure(error: redis.RedisError | OSError, place: str) -> StateUnavailable | None:
    """Return the translation of ``error`` from Redis at ``place``, or None if popgate's own call is at fault."""
    remedy = _remedy(error, place)
    if remedy is None:
        return None
    detail, seconds = remedy
    return StateUnavailable(detail, retry_after_seconds=seconds)


def _remedy(error: redis.RedisError | OSError, place: str) -> tuple[str, float] | None:
    match error:
        case redis.BusyLoadingError():
            return f"Redis at {place} is loading its data: wait until it is ready", RETRY_AFTER_SECONDS
        case redis.AuthenticationError() | redis.AuthorizationError():
            return f"Redis at {place} refuses the credentials ({error}): check user and password", REMEDY_SECONDS
        case redis.MaxConnectionsError():
            return f"Redis at {place} is slower than its callers: {error}", RETRY_AFTER_SECONDS
        case redis.TimeoutError() | TimeoutError():
            return f"Redis at {place} does not answer in time: check it and the network", RETRY_AFTER_SECONDS
        case MasterNotFoundError():  # older redis-py shows the Sentinels' passwords in its text
            return f"no Sentinel names a master for Redis at {place}: check the Sentinels", RETRY_AFTER_SECONDS
        case redis.ConnectionError() | OSError() if _TLS in str(error):
            return f"Redis at {place} and popgate do not trust each other ({error}): {_TLS_REMEDY}", REMEDY_SECONDS
        case redis.ConnectionError() | OSError():
            return f"Redis at {place} can't be reached ({error}): check that it runs", RETRY_AFTER_SECONDS
        case redis.OutOfMemoryError():
            return f"Redis at {place} has no memory left ({error}): raise maxmemory", REMEDY_SECONDS
        case redis.ReadOnlyError():
            return f"Redis at {place} is a replica, perhaps after a failover ({error})", RETRY_AFTER_SECONDS
        case redis.NoPermissionError():
            return f"Redis at {place} does not permit it ({error}): give this user all keys and scripts", REMEDY_SECONDS
        case redis.ResponseError():
            return _by_word(str(error), place)
        case _:
            return None


def _by_word(text: str, place: str) -> tuple[str, float] | None:
    """Translate an error by a word in its text, because Redis wraps an error inside a script in another error."""
    for word, (meaning, seconds) in _WORDS.items():
        if word in text:
            return f"Redis at {place} {meaning} ({text})", seconds
    return None


_TLS = "[SSL"
"""The beginning of OpenSSL's messages."""
_TLS_REMEDY = "check ssl_ca_certs, and ssl_certfile and ssl_keyfile if it asks for them, in the Redis URL"
_WORDS = {
    "OOM ": ("has no memory left: raise maxmemory", REMEDY_SECONDS),
    "READONLY ": ("is a replica, perhaps after a failover", RETRY_AFTER_SECONDS),
    "MISCONF ": ("can't write its data to disk and accepts no writes: check its disk", REMEDY_SECONDS),
    "NOREPLICAS ": ("has fewer replicas than it asks for and accepts no writes", RETRY_AFTER_SECONDS),
    "MASTERDOWN ": ("is a replica that has lost its master", RETRY_AFTER_SECONDS),
    "BUSY ": ("is blocked by a long-running script", RETRY_AFTER_SECONDS),
    "LOADING ": ("is loading its data", RETRY_AFTER_SECONDS),
    "NOAUTH ": ("asks for a password: give one in its URL", REMEDY_SECONDS),
    "WRONGPASS ": ("refuses the credentials: check user and password", REMEDY_SECONDS),
    "NOPERM ": ("does not permit it: give this user all keys and scripts", REMEDY_SECONDS),
    "max number of clients": ("has too many clients: raise maxclients", REMEDY_SECONDS),
    "unknown command": ("lacks commands: popgate needs Redis 5 or newer, with EVALSHA allowed", REMEDY_SECONDS),
}
