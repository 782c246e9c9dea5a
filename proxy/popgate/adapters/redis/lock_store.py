"""Implements the lock store on Redis.

Redis stores a hash with the JSON definition of each lock, and the next unused fencing token.
"""

from dataclasses import asdict
from typing import Any

import orjson

from popgate.adapters.redis.connection import RedisConnection
from popgate.domain.locks import LockDefinition, LockKind
from popgate.ports.lock_store import LockStore

_LOCKS = "locks"


class RedisLockStore:
    """Implements the state port's lock store on ``redis``. The caller closes ``redis``."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis

    async def definitions(self) -> list[LockDefinition]:
        return [_read(text) for _, text in await self._redis.read_hash(_LOCKS)]

    async def find(self, name: str) -> LockDefinition | None:
        text: str | None = await self._redis.run("find", _LOCKS, name)
        return None if text is None else _read(text)

    async def put(self, definition: LockDefinition) -> None:
        await self._redis.run("put", _LOCKS, definition.name, _json(definition))
        self._redis.remember_field(_LOCKS, definition.name, _json(definition))

    async def add(self, definition: LockDefinition) -> LockDefinition:
        text: str = await self._redis.run("add", _LOCKS, definition.name, _json(definition))
        self._redis.remember_field(_LOCKS, definition.name, text)
        return _read(text)

    async def delete(self, name: str) -> None:
        await self._redis.run("delete", _LOCKS, name)
        self._redis.forget_field(_LOCKS, name)

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        first: int = await self._redis.run("reserve_tokens", count, at_least)
        return first


def _json(definition: LockDefinition) -> str:
    return orjson.dumps(asdict(definition)).decode()


def _read(text: str) -> LockDefinition:
    fields: dict[str, Any] = orjson.loads(text)
    return LockDefinition(kind=LockKind(fields.pop("kind")), **fields)


_conforms: type[LockStore] = RedisLockStore
