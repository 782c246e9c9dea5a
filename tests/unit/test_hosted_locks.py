"""Locks that a proxy arbitrates itself, with the clock in the test's hands: what takes days, and what can't be seen."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.domain.errors import BrokerUnavailable, LockLost, LockNotFound
from popgate.domain.locks import MUTEX_KEPT_SECONDS, LockKind
from popgate.domain.names import InstanceId
from popgate.locks.embedded import TOKENS_RESERVED, EmbeddedArbiter
from popgate.locks.hosted import HostedLocks, Patience
from popgate.locks.hosted_grants import ENDED_MAX, HostedGrant
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import opened


def hosted(database: Database, clock: ManualClock, *, auto_create: bool = True) -> HostedLocks:
    store, background = SqliteLockStore(database), Background()
    arbiter = EmbeddedArbiter(store, clock, background)
    return HostedLocks(arbiter, store, clock, background, instance=InstanceId("i"), auto_create=auto_create)


@asynccontextmanager
async def started(folder: Path, clock: ManualClock, *, auto_create: bool = True) -> AsyncGenerator[HostedLocks]:
    async with opened(folder, clock) as database:
        locks = hosted(database, clock, auto_create=auto_create)
        await locks.start()
        try:
            yield locks
        finally:
            await locks.stop()


async def held(locks: HostedLocks, name: str = "a", ttl_seconds: float = 60.0) -> tuple[str, HostedGrant]:
    given = await locks.acquire(name, "h", ttl_seconds=ttl_seconds, wait_seconds=0.0, patience=Patience())
    assert given is not None
    return given


async def test_a_mutex_that_came_by_use_goes_after_a_day_without_any(tmp_path: Path) -> None:
    clock = ManualClock()
    async with started(tmp_path, clock) as locks:
        token, _ = await held(locks, "by-use", ttl_seconds=43_200)
        await locks.administer("defined", LockKind.MUTEX, None, None)
        for _ in range(3):
            clock.advance(43_000)
            await locks.renew("by-use", token, None)
        locks.due(clock.monotonic())
        assert {view.name for view in locks.locks()} == {"by-use", "defined"}, "it is held"
        await locks.release("by-use", token)
        await held(locks, "by-use", ttl_seconds=1)
        clock.advance(MUTEX_KEPT_SECONDS - 1)
        locks.due(clock.monotonic())
        assert {view.name for view in locks.locks()} == {"by-use", "defined"}
        clock.advance(1)
        locks.due(clock.monotonic())
        await asyncio.sleep(0.1)
        assert {view.name for view in locks.locks()} == {"defined"}
    async with started(tmp_path, clock) as locks:
        assert {view.name for view in locks.locks()} == {"defined"}


async def test_tokens_grow_over_restarts_also_with_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = ManualClock()
    tokens: list[int] = []
    for _ in range(3):
        async with started(tmp_path, clock) as locks:
            tokens.append((await held(locks))[1].fencing_token)
        clock.jump_wall(-3_600)
    assert tokens == sorted(set(tokens))
    assert tokens[1] >= tokens[0] + TOKENS_RESERVED


async def test_a_lock_is_over_at_its_time_even_where_the_timer_is_late(tmp_path: Path) -> None:
    clock = ManualClock()
    async with started(tmp_path, clock) as locks:
        token, _ = await held(locks, ttl_seconds=10)
        clock.advance(9.9)
        await locks.verify("a", token)
        clock.advance(0.1)
        with pytest.raises(LockLost, match="not renewed within"):
            await locks.verify("a", token)
        await asyncio.sleep(0)
        await held(locks)


async def test_who_waits_gets_nothing_after_the_patience_ended(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock()) as locks:
        token, _ = await held(locks)
        patience = Patience()
        waiting = asyncio.create_task(
            locks.acquire("a", "w", ttl_seconds=60, wait_seconds=30, patience=patience), name="waiting"
        )
        await asyncio.sleep(0.01)
        patience.end()
        await locks.release("a", token)  # in the same moment
        assert await waiting is None
        await held(locks)


async def test_a_lock_that_is_not_defined_is_not_there_where_nothing_is_made_by_use(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock(), auto_create=False) as locks:
        with pytest.raises(LockNotFound, match="PUT /v1/locks/a"):
            await held(locks)
        await locks.administer("a", LockKind.MUTEX, None, None)
        await held(locks)
        locks.drain()
        with pytest.raises(BrokerUnavailable, match="shutting down"):
            await held(locks)


async def test_what_became_of_old_tokens_is_forgotten(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock()) as locks:
        first, _ = await held(locks)
        await locks.release("a", first)
        with pytest.raises(LockLost, match="was released"):
            await locks.verify("a", first)
        for _ in range(ENDED_MAX):
            token, _ = await held(locks)
            await locks.release("a", token)
        with pytest.raises(LockLost, match="nothing is held under this token"):
            await locks.verify("a", first)
