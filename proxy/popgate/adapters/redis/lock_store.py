"""Implements the lock store on Redis.

Redis stores a hash with the JSON definition of each lock, and the next unused fencing token. Another program may have
written there. So the name of a lock is the key of its definition, and a definition that can't be read is ignored, but
not replaced.
"""

import logging
from dataclasses import asdict

import msgspec
import orjson

from popgate.adapters.redis.connection import RedisConnection
from popgate.domain.errors import Conflict, InvalidRequest
from popgate.domain.locks import LockDefinition, LockKind, checked_lock_name, checked_slots
from popgate.ports.lock_store import LockStore
from popgate.runtime.logs import OnceLogger

_log = logging.getLogger(__name__)
_LOCKS = "locks"


class _Definition(msgspec.Struct, frozen=True):
    """What is stored of a lock. Fields of a newer popgate are ignored."""

    kind: LockKind
    slots: int = 1
    enabled: bool = True
    by_use: bool = False
    deleted: bool = False


_decoded = msgspec.json.Decoder(_Definition).decode


class RedisLockStore:
    """Implements the state port's lock store on ``redis``. The caller closes ``redis``."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis
        self._unreadable = OnceLogger(_log, "the definition of a lock can't be read; it is ignored")

    async def definitions(self) -> list[LockDefinition]:
        found: list[LockDefinition] = []
        for name, text in await self._redis.read_hash(_LOCKS):
            try:
                found.append(_read(name, text))
            except Conflict as error:
                self._unreadable.warn(f"lock {name}", error.detail)
        return found

    async def find(self, name: str) -> LockDefinition | None:
        text = await self._redis.read_field(_LOCKS, name)
        return None if text is None else _read(name, text)

    async def put(self, definition: LockDefinition) -> None:
        await self._redis.run("put", _LOCKS, definition.name, _json(definition))
        self._redis.remember_field(_LOCKS, definition.name, _json(definition))

    async def add(self, definition: LockDefinition) -> LockDefinition:
        text: str = await self._redis.run("add", _LOCKS, definition.name, _json(definition))
        self._redis.remember_field(_LOCKS, definition.name, text)
        return _read(definition.name, text)

    async def delete(self, name: str) -> None:
        await self._redis.run("delete", _LOCKS, name)
        self._redis.forget_field(_LOCKS, name)

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        first: int = await self._redis.run("reserve_tokens", count, at_least)
        return first


def _json(definition: LockDefinition) -> str:
    return orjson.dumps(asdict(definition)).decode()


def _read(name: str, text: str) -> LockDefinition:
    """Return a definition from its name and its JSON, which another program may have written. Raises: Conflict."""
    try:
        entry = _decoded(text)
        checked_slots(entry.slots, entry.kind)
        return LockDefinition(name=checked_lock_name(name), **msgspec.structs.asdict(entry))
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise Conflict(
            f"the definition of lock {name!r} in Redis can't be read ({error}); repair or delete it"
        ) from error


_conforms: type[LockStore] = RedisLockStore
