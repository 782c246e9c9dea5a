"""The contract of the lock store, over every adapter; an adapter joins by a function to open it."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contract.store_openers import OpenerOf, store_opener
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.lock_store import RedisLockStore
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.domain.errors import Conflict
from popgate.domain.locks import LockDefinition, LockKind
from popgate.ports.lock_store import LockStore
from support.redis import RedisServer

DATABASE = 3
BUILD = LockDefinition(name="build", kind=LockKind.SEMAPHORE, slots=3)
CLEAN = LockDefinition(name="clean", kind=LockKind.MUTEX, by_use=True)
DEPLOY = LockDefinition(name="deploy", kind=LockKind.PERSISTENT_MUTEX, enabled=False)


Opener = OpenerOf[LockStore]


@pytest.fixture(params=["sqlite", "redis"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return store_opener(request, SqliteLockStore, RedisLockStore, redis_database=DATABASE)


async def test_definitions_are_kept_by_name_and_replaced(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        assert await store.definitions() == []
        for definition in (DEPLOY, BUILD, CLEAN):
            await store.put(definition)
    async with opener(tmp_path) as store:
        assert await store.definitions() == [BUILD, CLEAN, DEPLOY]
        again = LockDefinition(name="build", kind=LockKind.SEMAPHORE, slots=1)
        await store.put(again)
        for _ in range(2):
            await store.delete("clean")
        assert await store.definitions() == [again, DEPLOY]


async def test_one_definition_is_found_by_its_name_and_added_where_there_is_none(
    opener: Opener, tmp_path: Path
) -> None:
    async with opener(tmp_path) as store:
        assert await store.find("clean") is None
        assert await store.add(CLEAN) == CLEAN
        assert await store.find("clean") == CLEAN
        other = LockDefinition(name="clean", kind=LockKind.SEMAPHORE, slots=2)
        assert await store.add(other) == CLEAN, "who came first"
        await store.put(other)
        assert await store.find("clean") == await store.add(CLEAN) == other
        await store.delete("clean")
        assert await store.add(CLEAN) == CLEAN
        assert set(await asyncio.gather(store.add(BUILD), store.add(BUILD))) == {BUILD}


UNREADABLE = ("junk", "[]", '{"kind":"cage"}', '{"kind":"semaphore","slots":1000000000}', '{"kind":"mutex","slots":2}')


@pytest.mark.parametrize("says", UNREADABLE)
async def test_a_definition_that_can_not_be_read_is_ignored_and_not_replaced(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, says: str
) -> None:
    async with opened(redis_server) as (store, redis):
        await store.put(BUILD)
        await redis.command("HSET", f"{redis.prefix}locks", "clean", says)
        assert [await store.definitions() for _ in range(2)] == [[BUILD]] * 2
        assert [record.getMessage() for record in caplog.records].count(
            "the definition of a lock can't be read; it is ignored"
        ) == 1
        for ask in (store.find("clean"), store.add(CLEAN)):
            with pytest.raises(Conflict, match="repair or delete it"):
                await ask


async def test_the_key_of_a_definition_is_its_name_and_newer_fields_are_ignored(redis_server: RedisServer) -> None:
    async with opened(redis_server) as (store, redis):
        says = '{"name":"victim","kind":"mutex","slots":1,"colour":"red"}'
        await redis.command("HSET", f"{redis.prefix}locks", "evil", says)
        assert await store.definitions() == [LockDefinition(name="evil", kind=LockKind.MUTEX)]


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncGenerator[tuple[RedisLockStore, RedisConnection]]:
    redis = RedisConnection(parse_address(server.url()), secrets.token_hex(4))
    try:
        yield RedisLockStore(redis), redis
    finally:
        await redis.close()


async def test_no_token_is_reserved_twice(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        assert await store.reserve_tokens(10, at_least=100) == 100
        firsts = await asyncio.gather(*(store.reserve_tokens(5, at_least=0) for _ in range(20)))
        assert sorted(firsts) == list(range(110, 210, 5))
    async with opener(tmp_path) as store:
        large = 2**52
        assert await store.reserve_tokens(1, at_least=0) == 210
        assert await store.reserve_tokens(3, at_least=large) == large
        assert await store.reserve_tokens(1, at_least=large) == large + 3
