"""Faults of Redis under a cluster with load, judged by the audit."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.conftest import assert_kept, assert_no_traceback, at_work, drain, report
from support.audit import Audit
from support.audit_load import Habits
from support.audit_rules import Kind, explain, judge
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

SIZE = 3
GROW_COUNT = 150
LOSSES, LOSSES_FULL = 2, 12
LONG_SECONDS = 120.0
"""Seconds; longer than any test, so a lease of that length is live to its end."""

pytestmark = pytest.mark.crash


@pytest.fixture
def redis_alone(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that the test may end. Depends on the shared one, which handles a missing installation."""
    with RedisServer(tmp_path / "fragile-redis", {"appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, rabbitmq: RabbitNode, redis_alone: RedisServer) -> Iterator[ProxyCluster]:
    with ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=redis_alone, size=SIZE) as cluster:
        yield cluster
        for proxy in cluster.proxies:
            assert proxy.is_running()
            assert_no_traceback(proxy)


async def test_promises_outlive_absences_of_redis(
    cluster: ProxyCluster, redis_alone: RedisServer, seed: int, full_run: bool
) -> None:
    audit, chance = Audit(), random.Random(seed)
    habits = Habits.with_everything(
        publishers=1, consumers=3, open_max=500, held_seconds=LONG_SECONDS, lease_seconds=LONG_SECONDS / 4
    )
    refusals: Counter[str] = Counter()
    async with at_work(cluster, audit, seed, habits) as loads:
        for how in ("stop", "kill", "hang") * (4 if full_run else 1):
            await loads[0].grow(GROW_COUNT)
            audit.mark(how)
            if how == "hang":
                await asyncio.to_thread(redis_alone.pause)
                await asyncio.sleep(chance.uniform(0.5, 4.0))
                await asyncio.to_thread(redis_alone.resume)
            else:
                await asyncio.to_thread(redis_alone.stop if how == "stop" else redis_alone.kill)
                await asyncio.sleep(chance.uniform(0.0, 2.0))
                await asyncio.to_thread(redis_alone.start)
            audit.mark("Redis is up")
            await loads[0].grow(GROW_COUNT)
            assert_kept(audit)
        await drain(loads)
        for load in loads:
            refusals.update(load.client.refusals)
    report(f"seed {seed}", audit, refusals=dict(refusals))
    assert_kept(audit, drained=True)


async def test_nothing_is_lost_with_the_data_of_redis_and_little_comes_again(
    cluster: ProxyCluster, redis_alone: RedisServer, seed: int, full_run: bool
) -> None:
    """Only messages whose settlement was under way at the loss come again: no more than the requests under way."""
    audit = Audit()
    habits = Habits(
        publishers=1,
        consumers=3,
        batch_max=8,
        open_max=500,
        held_seconds=LONG_SECONDS,
        lease_seconds=LONG_SECONDS / 4,
        attempt_share=0.0,
        delayed_share=0.2,
    )
    refusals: Counter[str] = Counter()
    losses = LOSSES_FULL if full_run else LOSSES
    async with at_work(cluster, audit, seed, habits) as loads:
        for _ in range(losses):
            await loads[0].grow(GROW_COUNT)
            audit.mark("the data are lost")
            await asyncio.to_thread(redis_alone.ask, "FLUSHALL")
            await loads[0].grow(GROW_COUNT)
        await drain(loads)
        for load in loads:
            refusals.update(load.client.refusals)
    violations = judge(audit, drained=True)
    kinds = Counter(violation.kind for violation in violations)
    report(f"seed {seed}", audit, refusals=dict(refusals), violations={str(kind): n for kind, n in kinds.items()})
    tolerated = {Kind.CAME_AGAIN, Kind.OVERLAP, Kind.COUNT, Kind.REFUSED, Kind.EARLY, Kind.TAKEN}
    assert kinds.keys() <= tolerated, explain([one for one in violations if one.kind not in tolerated])
    under_way = losses * SIZE * habits.consumers * habits.batch_max
    assert len({violation.message_id for violation in violations}) <= under_way, explain(violations)
