"""The cost, for other pops, of pops with filters that match nothing at a proxy that owns no queues.

Two clusters, each of an owner and a proxy without queues, get single messages in turns. At one of them, thousands of
pops with filters are parked, wait, and end. Each of them is forwarded to the owner when it comes, and once more before
it ends, because messages have arrived since.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import load
from bench.filtered import BESIDE, TARGET, WITHOUT, Pair, many_files, parked_count
from bench.report import Report, Row
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

PARKED = 10_000
WAIT_SECONDS = 30
"""Wait time of a parked pop in seconds, which is the maximum."""
MESSAGES_MIN = 200
"""Minimum number of messages for each cluster before the pops with filters come."""
PARKED_AT_ONCE = 100
PHASES = BEFORE, PARKING, WAITING, ENDING = "before", "while they park", "while they wait", "while they end"


async def _measure(
    ports: dict[str, tuple[int, int]], parked: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Return the milliseconds from publish to pop by phase and cluster, and the seconds that each phase took."""
    pairs = {
        name: Pair(await load.connect(owner), await load.connect(without_queues))
        for name, (owner, without_queues) in ports.items()
    }
    times = {phase: {name: list[float]() for name in ports} for phase in PHASES}
    took: dict[str, float] = {}

    async def measure(phase: str, is_over: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not is_over():
            for name, pair in pairs.items():
                times[phase][name].append(await pair.milliseconds())
        took[phase] = time.perf_counter() - began

    await measure(BEFORE, lambda: len(times[BEFORE][BESIDE]) >= MESSAGES_MIN)
    edge = ports[BESIDE][1]
    looking = await load.connect(edge)
    connections = [await load.connect(edge) for _ in range(parked)]
    pops: list[asyncio.Future[object]] = []

    async def park() -> None:
        for place, connection in enumerate(connections):
            body = {"wait_seconds": WAIT_SECONDS, "filter": {"kind": "order", "id": [place]}}
            pops.append(asyncio.ensure_future(connection.post(f"{load.SUBSCRIPTION}/pop", body)))
            if place % PARKED_AT_ONCE == 0:
                await asyncio.sleep(0.02)
        while await parked_count(looking) < parked:
            if any(pop.done() for pop in pops):
                raise RuntimeError("pops have ended before all were parked; scale it down")
            await asyncio.sleep(1)  # each look costs the proxy as much as some 50 pops

    parking = asyncio.ensure_future(park())
    await measure(PARKING, parking.done)
    await parking
    await measure(WAITING, lambda: any(pop.done() for pop in pops))
    await measure(ENDING, lambda: all(pop.done() for pop in pops))
    await asyncio.gather(*pops)
    return times, took


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    parked = int(PARKED * scale)
    with many_files(), ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis-filters"))
        ports: dict[str, tuple[int, int]] = {}
        for name in (WITHOUT, BESIDE):
            cluster = ProxyCluster(folder / f"filters-{name}", nodes=(rabbitmq,), redis=redis, size=1)
            owner = stack.enter_context(cluster).proxies[0]
            load.make_topic(owner, 1)
            edge = cluster.add("--owns-queues", "false")
            edge.start()
            ports[name] = owner.port, edge.port
        times, took = asyncio.run(_measure(ports, parked))
    for phase, what in ((PARKING, "parked"), (ENDING, "ended, after the first")):
        report.add(Row(name=f"no queues: until {parked:,} filters {what}", value=took[phase], unit="s"))
    for phase in PHASES:
        beside, without = (statistics.median(times[phase][name]) for name in (BESIDE, WITHOUT))
        has_target = phase != BEFORE
        report.add(
            Row(
                name=f"no queues: publish to pop, p50 {phase}",
                value=beside,
                unit="ms",
                against="a cluster without them",
                ratio=beside / without,
                target=f"<= {TARGET}x" if has_target else "",
                reached=beside / without <= TARGET if has_target else None,
            )
        )
