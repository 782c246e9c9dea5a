"""The state stores under test, on every adapter, and helpers for their contract tests.

An adapter joins by a name in ``STORES`` and functions to open it on an empty folder, to advance time, and to restart
it. Import the fixtures ``bench`` and ``open_bench`` by name.
"""

import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import cache, partial
from hashlib import sha1
from math import inf
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.dedup import RedisDedupStore
from popgate.adapters.redis.lease_groups import RedisLeaseGroups
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.adapters.redis.scripts import Script, script
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.lease import (
    GrantAnswer,
    GrantStatus,
    LeaseRecord,
    RecordState,
    SettleAction,
    SettleAnswer,
    SettleStatus,
)
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.dedup import DedupStore
from popgate.ports.lease_groups import LeaseGroupStore
from popgate.ports.leases import GrantEntry, GrantRequest, GroupPart, LeaseStore, SettleEntry
from popgate.runtime.clocks import ManualClock
from simulator.direct import memory_connection
from simulator.redis_memory import MemoryRedis
from support.redis import RedisServer

QUEUE = BrokerQueue("popgate:t:g:0")
OTHER_QUEUE = BrokerQueue("popgate:t:g:1")
DEAD = BrokerQueue("popgate:t:g:dead")
SUBSCRIPTION = Subscription(TopicName("t"), GroupName("g"))
A, B, C = CopyId("copy-a"), CopyId("copy-b"), CopyId("copy-c")
TRANSIENT = CopyId("~node.1.7")
FIRST, SECOND, THIRD = LeaseId("first"), LeaseId("second"), LeaseId("third")
INVISIBILITY = 30.0


class Bench(Protocol):
    """The stores under test: of leases, lease groups and dedup ids. ``restart`` replaces all of these objects."""

    @property
    def store(self) -> LeaseStore: ...

    @property
    def groups(self) -> LeaseGroupStore: ...

    @property
    def dedup(self) -> DedupStore: ...

    async def pass_time(self, seconds: float) -> None: ...

    async def restart(self) -> None: ...


class SqliteBench:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = ManualClock()
        self._database: Database | None = None
        self.store: LeaseStore
        self.groups: LeaseGroupStore
        self.dedup: DedupStore

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def restart(self) -> None:
        await self.close()
        self._database = Database(self._folder / "popgate.db", self._clock)
        await self._database.open()
        records = LatestRecords()
        self.store = SqliteLeaseStore(self._database, records)
        self.groups = SqliteLeaseGroups(self._database, records)
        self.dedup = SqliteDedupStore(self._database)

    async def close(self) -> None:
        if self._database is not None:
            await self._database.close()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncGenerator[Bench]:
    bench = SqliteBench(folder)
    try:
        await bench.restart()
        yield bench
    finally:
        await bench.close()


CLOCK = "bench:clock"
"""The key that scripts of a ``RedisBench`` read instead of Redis' time, in microseconds."""


@contextmanager
def clock_in_redis() -> Generator[None]:
    """Make the scripts read their time from ``CLOCK``, because Redis' own clock can't be set."""

    @cache
    def changed(name: str) -> Script:
        text = script(name).text.replace(b"redis.call('TIME')", f"{{ 0, redis.call('GET', '{CLOCK}') }}".encode())
        return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())

    with patch("popgate.adapters.redis.connection.script", changed):
        yield


class RedisBench:
    """A database for this bench alone, under ``clock_in_redis``. Only ``pass_time`` advances time."""

    def __init__(self, connect: Callable[[], RedisConnection]) -> None:
        self._connect = connect
        self._connection: RedisConnection | None = None
        self.store: LeaseStore
        self.groups: LeaseGroupStore
        self.dedup: DedupStore

    async def pass_time(self, seconds: float) -> None:
        assert self._connection is not None
        await self._connection.command("INCRBY", CLOCK, round(seconds * 1_000_000))

    async def restart(self) -> None:
        """Restart as another process; ``test_redis_state`` restarts Redis itself."""
        await self._disconnect()
        self._connection = self._connect()
        self.store = RedisLeaseStore(self._connection)
        self.groups = RedisLeaseGroups(self._connection)
        self.dedup = RedisDedupStore(self._connection)

    async def begin(self) -> None:
        await self.restart()
        assert self._connection is not None
        await self._connection.command("FLUSHDB")
        await self._connection.command("SET", CLOCK, time.time_ns() // 1000)
        for queue in (QUEUE, OTHER_QUEUE):  # in use before: else missing records count as lost with the data
            await self._connection.command("HSET", f"{self._connection.prefix}claims", queue, 0)

    async def close(self) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()


@asynccontextmanager
async def redis(server: RedisServer, folder: Path) -> AsyncGenerator[Bench]:
    address = parse_address(server.url(BENCH_DATABASE))
    async with _on_redis(lambda: RedisConnection(address)) as bench:
        yield bench


@asynccontextmanager
async def simulated(folder: Path) -> AsyncGenerator[Bench]:
    """The simulation's Redis, below the same adapter."""
    memory = MemoryRedis(time.time)
    async with _on_redis(lambda: memory_connection(memory)) as bench:
        yield bench


@asynccontextmanager
async def _on_redis(connect: Callable[[], RedisConnection]) -> AsyncGenerator[Bench]:
    bench = RedisBench(connect)
    with clock_in_redis():
        try:
            await bench.begin()
            yield bench
        finally:
            await bench.close()


OpenBench = Callable[[Path], AbstractAsyncContextManager[Bench]]
STORES = ("sqlite", "redis", "simulated")
BENCH_DATABASE = 1


@pytest.fixture(scope="session", params=STORES)
def open_bench(request: pytest.FixtureRequest) -> OpenBench:
    if request.param == "redis":
        return partial(redis, request.getfixturevalue("redis_server"))
    return sqlite if request.param == "sqlite" else simulated


@pytest.fixture
async def bench(open_bench: OpenBench, tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(tmp_path) as bench:
        yield bench


# ---------------------------------------------------------------- words for the tests


async def grant(
    bench: Bench,
    lease_id: LeaseId,
    *copy_ids: CopyId,
    queue: BrokerQueue = QUEUE,
    epoch: int = 1,
    seconds: float = INVISIBILITY,
    max_deliveries: int | None = None,
    earlier: int = 0,
    generation: int = 1,
    attempt_id: str | None = None,
    group: GroupPart | None = None,
) -> list[GrantAnswer]:
    return await bench.store.grant(
        GrantRequest(
            subscription=SUBSCRIPTION,
            lease_id=lease_id,
            entries=[GrantEntry(queue, epoch, copy_id, earlier) for copy_id in copy_ids],
            invisibility_seconds=seconds,
            max_deliveries=max_deliveries,
            mode_generation=generation,
            attempt_id=attempt_id,
            group=group,
        )
    )


async def settle(
    bench: Bench,
    action: SettleAction,
    lease_id: LeaseId,
    copy_id: CopyId = A,
    *,
    queue: BrokerQueue = QUEUE,
    seconds: float = 0.0,
    reason: str = "",
    age_max: float = inf,
) -> SettleAnswer:
    target = DEAD if action in (SettleAction.MOVE, SettleAction.EXHAUST) else None
    target_copy_id = CopyId(f"dead-{copy_id}") if target is not None else None
    entry = SettleEntry(queue, copy_id, lease_id, action, seconds, target, target_copy_id, reason, age_max)
    return (await bench.store.settle([entry]))[0]


def statuses(answers: Sequence[GrantAnswer]) -> list[GrantStatus]:
    return [answer.status for answer in answers]


async def leased(bench: Bench, lease_id: LeaseId = FIRST, copy_id: CopyId = A) -> LeaseRecord:
    (answer,) = await grant(bench, lease_id, copy_id)
    assert answer.status is GrantStatus.GRANTED
    assert answer.record is not None
    return answer.record


async def in_state(bench: Bench, state: RecordState) -> None:
    """Bring the record of A, leased as FIRST, into ``state``."""
    await leased(bench)
    match state:
        case RecordState.LEASED:
            return
        case RecordState.EXPIRED:
            await bench.pass_time(INVISIBILITY)
            answer = await settle(bench, SettleAction.EXPIRE, FIRST, seconds=60.0)
        case RecordState.RELEASED:
            answer = await settle(bench, SettleAction.RELEASE, FIRST, seconds=60.0)
        case RecordState.MOVING:
            answer = await settle(bench, SettleAction.MOVE, FIRST)
        case RecordState.ACKED:
            answer = await settle(bench, SettleAction.ACK, FIRST)
        case RecordState.DEAD:
            await settle(bench, SettleAction.MOVE, FIRST)
            answer = await settle(bench, SettleAction.MOVED, FIRST)
        case RecordState.DISCARDED:
            await bench.pass_time(INVISIBILITY)
            answer = await settle(bench, SettleAction.DISCARD, FIRST)
    assert answer.status is SettleStatus.DONE
    assert answer.record is not None
    assert answer.record.state is state
