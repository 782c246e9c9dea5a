"""Locks that a proxy arbitrates alone, with the clock under the test's control: cases that take days or can't be
observed.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.domain.errors import (
    BrokerUnavailable,
    Conflict,
    LockLost,
    LockNotFound,
    LockUnavailable,
    QuotaExceeded,
    StateUnavailable,
)
from popgate.domain.locks import MUTEX_KEPT_SECONDS, LockDefinition, LockKind
from popgate.domain.names import InstanceId
from popgate.locks.embedded import TOKENS_RESERVED, EmbeddedArbiter
from popgate.locks.hosted import HostedLocks
from popgate.locks.hosted_grants import ENDED_MAX, HostedGrant, holder_of
from popgate.locks.lock_waiter import LockWaiter
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import opened


def hosted(database: Database, clock: ManualClock, *, auto_create: bool = True, locks_max: int = 10) -> HostedLocks:
    store, background = SqliteLockStore(database), Background()
    arbiter, instance = EmbeddedArbiter(store, clock, background), InstanceId("i")
    return HostedLocks(
        arbiter, store, clock, background, instance=instance, auto_create=auto_create, locks_max=locks_max
    )


@asynccontextmanager
async def started(
    folder: Path, clock: ManualClock, *, auto_create: bool = True, locks_max: int = 10
) -> AsyncGenerator[HostedLocks]:
    async with opened(folder, clock) as database:
        locks = hosted(database, clock, auto_create=auto_create, locks_max=locks_max)
        await locks.start()
        try:
            yield locks
        finally:
            await locks.stop()


async def held(locks: HostedLocks, name: str = "a", ttl_seconds: float = 60.0) -> tuple[str, HostedGrant]:
    given = await locks.acquire(name, "h", ttl_seconds=ttl_seconds, wait_seconds=0.0, waiter=LockWaiter())
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


async def test_a_new_lock_takes_the_place_of_the_idle_mutex_by_use_that_was_used_longest_ago(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock(), locks_max=4) as locks:
        await locks.administer("defined", LockKind.MUTEX, None, None)
        await held(locks, "held")
        for name in ("first", "second", "first"):
            await locks.release(name, (await held(locks, name))[0])
        await held(locks, "new")
        assert names(locks) == ["defined", "first", "held", "new"]
        await locks.administer("asked", LockKind.MUTEX, None, None)
        assert names(locks) == ["asked", "defined", "held", "new"]
        with pytest.raises(QuotaExceeded):
            await held(locks, "none-is-idle")
        assert names(locks) == ["asked", "defined", "held", "new"]


async def test_places_that_are_taken_at_the_same_time_keep_to_the_quota(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock(), locks_max=3) as locks:
        for number in range(3):
            await locks.release(f"old-{number}", (await held(locks, f"old-{number}"))[0])
        given = await asyncio.gather(*(held(locks, f"new-{number}") for number in range(5)), return_exceptions=True)
        assert sum(isinstance(one, tuple) for one in given) == 3
        assert sum(isinstance(one, QuotaExceeded) for one in given) == 2
        assert [name[:3] for name in names(locks)] == ["new"] * 3


async def test_tokens_grow_over_restarts_also_with_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = ManualClock()
    tokens: list[int] = []
    for _ in range(3):
        async with started(tmp_path, clock) as locks:
            tokens.append((await held(locks))[1].fencing_token)
        clock.jump_wall(-3_600)
    assert tokens == sorted(set(tokens))
    assert tokens[1] >= tokens[0] + TOKENS_RESERVED


async def test_tokens_grow_over_a_store_that_was_deleted(tmp_path: Path) -> None:
    clock = ManualClock()
    tokens: list[int] = []
    for number in range(2):
        async with started(tmp_path / f"{number}", clock) as locks:
            tokens.append((await held(locks))[1].fencing_token)
        clock.advance(1)
    assert tokens[0] < tokens[1]


async def test_a_lock_whose_deletion_the_store_refuses_is_there_and_can_be_acquired(tmp_path: Path) -> None:
    class NoDeletions(SqliteLockStore):
        async def delete(self, name: str) -> None:
            raise StateUnavailable("away, says the test")

    clock, background = ManualClock(), Background()
    async with opened(tmp_path, clock) as database:
        store = NoDeletions(database)
        arbiter = EmbeddedArbiter(store, clock, background)
        locks = HostedLocks(arbiter, store, clock, background, instance=InstanceId("i"), auto_create=False)
        await locks.start()
        await locks.administer("a", LockKind.MUTEX, None, None)
        with pytest.raises(StateUnavailable):
            await locks.delete("a")
        await held(locks)
        await locks.stop()


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
        waiter = LockWaiter()
        waiting = asyncio.create_task(
            locks.acquire("a", "w", ttl_seconds=60, wait_seconds=30, waiter=waiter), name="waiting"
        )
        await asyncio.sleep(0.01)
        waiter.end()
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


# ---------------------------------------------------------------- beside other proxies


class TwoProxies:
    """Locks ``a`` and ``b`` over one store. Each arbitrates alone: only the definitions are shared."""

    def __init__(self, database: Database, clock: ManualClock) -> None:
        self.store, self.clock = SqliteLockStore(database), clock
        self.is_cut_off = False
        self.a, self.b = self._locks("a"), self._locks("b")

    def _locks(self, name: str) -> HostedLocks:
        background = Background()
        arbiter = EmbeddedArbiter(self.store, self.clock, background)

        async def announce() -> None:
            if not self.is_cut_off:
                await (self.b if name == "a" else self.a).follow()

        return HostedLocks(
            arbiter,
            self.store,
            self.clock,
            background,
            instance=InstanceId(name),
            auto_create=True,
            announce=announce,
        )


@pytest.fixture
async def two(tmp_path: Path) -> AsyncGenerator[TwoProxies]:
    async with opened(tmp_path) as database:
        two = TwoProxies(database, ManualClock())
        await two.a.start()
        await two.b.start()
        yield two
        await two.a.stop()
        await two.b.stop()


def names(locks: HostedLocks) -> list[str]:
    return [view.name for view in locks.locks()]


async def test_a_token_names_the_proxy_that_holds_the_lock(two: TwoProxies) -> None:
    for locks, name in ((two.a, "a"), (two.b, "b")):
        token, _ = await held(locks, f"of-{name}")
        assert holder_of(token) == name
    for token in ("", "x", ".x"):
        assert holder_of(token) is None


async def test_what_one_proxy_defines_the_others_know_when_it_is_answered(two: TwoProxies) -> None:
    await two.a.administer("x", LockKind.SEMAPHORE, 3, None)
    assert [(view.kind, view.slots) for view in two.b.locks()] == [(LockKind.SEMAPHORE, 3)]
    await two.b.administer("x", LockKind.SEMAPHORE, None, enabled=False)
    assert [(view.slots, view.enabled) for view in two.a.locks()] == [(3, False)]
    with pytest.raises(Conflict, match="is a semaphore"):
        await two.b.administer("x", LockKind.MUTEX, None, None)
    await two.b.delete("x")
    assert names(two.a) == names(two.b) == []
    with pytest.raises(LockNotFound):
        await two.a.delete("x")


async def test_what_came_into_being_by_use_is_looked_up(two: TwoProxies) -> None:
    await held(two.a, "by-use")
    assert names(two.b) == []
    assert (await two.b.describe("by-use")).kind is LockKind.MUTEX
    two.is_cut_off = True
    await two.a.administer("x", LockKind.SEMAPHORE, 2, None)
    _, hosted = await held(two.b, "x")
    assert hosted.definition.slots == 2, "and not made by use as another kind"
    with pytest.raises(LockNotFound):
        await two.b.verify("nothing", "a.token")


async def test_a_change_that_was_not_heard_of_is_followed_later_and_never_undone(two: TwoProxies) -> None:
    await two.a.administer("x", LockKind.SEMAPHORE, 2, None)
    two.is_cut_off = True
    await two.a.administer("x", LockKind.SEMAPHORE, 5, None)
    view = await two.b.administer("x", LockKind.SEMAPHORE, None, enabled=True)
    assert view.slots == 5, "what is left out stays as the other one has said"
    await two.a.delete("x")
    await two.a.administer("x", LockKind.MUTEX, None, None)
    with pytest.raises(Conflict, match="is a mutex"):
        await two.b.administer("x", LockKind.SEMAPHORE, None, None)


async def test_who_holds_or_awaits_what_another_proxy_deletes_is_told(two: TwoProxies) -> None:
    await two.a.administer("x", LockKind.PERSISTENT_MUTEX, None, None)
    token, _ = await held(two.b, "x")
    waiting = asyncio.create_task(
        two.b.acquire("x", "w", ttl_seconds=60, wait_seconds=30, waiter=LockWaiter()), name="waiting"
    )
    await asyncio.sleep(0.01)
    await two.a.delete("x")
    with pytest.raises(LockNotFound):
        await waiting
    with pytest.raises(LockLost, match="deleted"):
        await two.b.verify("x", token)
    assert await two.b.release("x", token) is False


async def test_a_definition_that_can_not_be_read_does_not_keep_a_proxy_from_following_the_others(
    two: TwoProxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "x"):
        await two.a.administer(name, LockKind.MUTEX, None, None)
    definitions, find = two.store.definitions, two.store.find

    async def readable() -> list[LockDefinition]:
        return [one for one in await definitions() if one.name != "a"]

    async def find_readable(name: str) -> LockDefinition | None:
        if name == "a":
            raise Conflict("the definition can't be read")
        return await find(name)

    monkeypatch.setattr(two.store, "definitions", readable)
    monkeypatch.setattr(two.store, "find", find_readable)
    token, _ = await held(two.b, "x")
    await two.a.delete("x")
    await two.a.administer("x", LockKind.SEMAPHORE, 2, None)
    with pytest.raises(LockLost, match="deleted"):
        await two.b.verify("x", token)
    assert [(view.name, view.kind) for view in two.b.locks()] == [("a", LockKind.MUTEX), ("x", LockKind.SEMAPHORE)]


async def test_a_mutex_that_one_proxy_forgets_stays_where_another_one_holds_it(two: TwoProxies) -> None:
    token, _ = await held(two.b, "by-use", ttl_seconds=43_200)
    await two.store.delete("by-use")  # as a program does that considers it useless
    await two.b.follow()
    await two.b.verify("by-use", token)
    assert (await two.a.describe("by-use")).kind is LockKind.MUTEX
    await two.b.release("by-use", token)
    await two.store.delete("by-use")
    await two.b.follow()
    assert names(two.b) == []


async def test_a_lock_that_was_defined_again_is_not_deleted_by_a_proxy_whose_deletion_was_paused(
    two: TwoProxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.a.administer("x", LockKind.MUTEX, None, None)

    async def complete_and_define_again() -> None:
        monkeypatch.undo()
        await two.b.delete("x")
        await two.b.administer("x", LockKind.SEMAPHORE, 2, None)

    monkeypatch.setattr(two.b, "follow", complete_and_define_again)
    await two.a.delete("x")
    assert names(two.a) == names(two.b) == ["x"]
    assert await two.store.find("x") == LockDefinition(name="x", kind=LockKind.SEMAPHORE, slots=2)


async def test_the_queues_of_a_lock_are_deleted_when_no_proxy_uses_it_any_more(
    two: TwoProxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ ends the connection of a proxy that begins to consume a queue while it is being deleted."""
    await two.a.administer("x", LockKind.MUTEX, None, None)
    await held(two.b, "x")

    async def delete(*_: object) -> None:
        assert two.b.grants.of("x") == []
        with pytest.raises(LockUnavailable, match="being deleted"):
            await two.b.acquire("x", "h", ttl_seconds=60, wait_seconds=0, waiter=LockWaiter())
        with pytest.raises(LockUnavailable, match="DELETE /v1/locks/x"):
            await two.b.administer("x", LockKind.MUTEX, None, None)
        raise BrokerUnavailable("down")

    with monkeypatch.context() as down:
        down.setattr(EmbeddedArbiter, "delete", delete)
        with pytest.raises(BrokerUnavailable):
            await two.a.delete("x")
    assert names(two.a) == names(two.b) == []
    await two.b.delete("x")  # completes it
    await held(two.a, "x")
    assert await two.store.find("x") == LockDefinition(name="x", kind=LockKind.MUTEX, by_use=True)
