"""How many queues move when proxies join, leave and vanish, and how long it takes: the real loops over a real Redis.

All members are in this process, and consumption is simulated: a hand-over takes as long as `support.owners` says. A
vanished member is detected by its missing heartbeats alone, as with a lost host; times are at the default heartbeats.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from bench.report import Report, Row
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from support.owners import Cluster
from support.redis import RedisServer

QUEUES = (8, 100, 1_000)
SIZE_MAX = 10
BALANCED_SECONDS, VANISHED_SECONDS = 5.0, 12.0


def rows(report: Report, folder: Path) -> None:
    """Add a row on moves and one on time for each number of queues and each kind of change, over 2 to 10 proxies."""
    with RedisServer(folder / "redis-moves") as server:
        for count in QUEUES:
            asyncio.run(_rows(report, server.url(), count))


async def _rows(report: Report, redis_url: str, count: int) -> None:
    async with AsyncExitStack() as stack:
        redis = RedisConnection(parse_address(redis_url), secrets.token_hex(4))
        stack.push_async_callback(redis.close)
        cluster = Cluster(redis, stack, count)
        await cluster.join()
        await cluster.settled()

        async def join() -> int:
            await cluster.join()
            return count // len(cluster.proxies)

        async def leave() -> int:
            proxy = cluster.proxies.pop(0)
            had = _owned(cluster, proxy.me)
            await proxy.stop()
            return had

        async def vanish() -> int:
            proxy = cluster.proxies.pop(0)
            had = _owned(cluster, proxy.me)
            await proxy.die()
            return had

        await _change(report, cluster, f"{count:,} queues, 1 to {SIZE_MAX} proxies join", join, BALANCED_SECONDS)
        await _change(report, cluster, f"{count:,} queues, {SIZE_MAX} to 2 proxies leave", leave, BALANCED_SECONDS)
        await _change(report, cluster, f"{count:,} queues, 1 to {SIZE_MAX} proxies join again", join, BALANCED_SECONDS)
        await _change(report, cluster, f"{count:,} queues, {SIZE_MAX} to 2 proxies vanish", vanish, VANISHED_SECONDS)


def _owned(cluster: Cluster, me: str) -> int:
    return sum(who == me for who in cluster.consumed.by.values())


async def _change(
    report: Report, cluster: Cluster, name: str, change: Callable[[], Awaitable[int]], seconds_max: float
) -> None:
    """Make nine changes, one by one, each with the number of queues that have to move for it."""
    least, moved, longest, moved_twice = 0, 0, 0.0, False
    for _ in range(SIZE_MAX - 1):
        for proxy in cluster.proxies:
            proxy.hosts.taken.clear()
        least += await change()
        longest = max(longest, await cluster.settled(2 * VANISHED_SECONDS))
        moves = sum((proxy.hosts.taken for proxy in cluster.proxies), Counter[str]())
        moved += moves.total()
        moved_twice |= any(times > 1 for times in moves.values())
    report.add(
        Row(
            name=f"owners: {name}: moves",
            value=moved,
            unit="",
            against="the fewest possible",
            ratio=moved / least,
            target="<= 1x",
            reached=moved <= least and not moved_twice,
        )
    )
    report.add(
        Row(
            name=f"owners: {name}: longest until even",
            value=longest,
            unit="s",
            target=f"<= {seconds_max:g} s",
            reached=longest <= seconds_max,
        )
    )
