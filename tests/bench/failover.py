"""An owner is killed under load repeatedly: how long until the other proxies serve each of its queues."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from bench import load
from bench.report import Report, Row
from support.audit_client import until
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

KILLS = 50
QUEUES = 12
PAUSE_SECONDS = 0.02
"""Seconds between two publishes of one message to each queue."""
POPPERS = 8
SECONDS_MAX = 3.0
GIVE_UP_SECONDS = 30.0
SEED = 1


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add the median and the 99th percentile over this many kills."""
    kills = max(1, int(KILLS * scale))
    with (
        RedisServer(folder / "redis-failover") as redis,
        ProxyCluster(folder / "failover", nodes=(rabbitmq,), redis=redis, size=3) as cluster,
    ):
        load.make_topic(cluster.proxies[0], QUEUES)
        outages = sorted(asyncio.run(_outages(cluster, kills)))
    for percent in (50, 99):
        value = outages[min(kills - 1, kills * percent // 100)]
        limit = SECONDS_MAX if percent == 99 else None
        report.add(
            Row(
                name=f"cluster: an owner killed until its queues flow, p{percent} of {kills}",
                value=value,
                unit="s",
                target="" if limit is None else f"<= {limit:g} s",
                reached=None if limit is None else value <= limit,
            )
        )


async def _outages(cluster: ProxyCluster, kills: int) -> list[float]:
    """Return how long the last of its queues was away after each kill, in seconds."""
    chance, found = random.Random(SEED), list[float]()
    for number in range(1, kills + 1):
        await asyncio.to_thread(wait_until, lambda: _is_even(cluster), timeout_seconds=30, what="balance")
        victim = chance.choice(cluster.proxies)
        theirs = await asyncio.to_thread(_queues_of, victim)
        flow = Flow()
        survivors = [proxy.port for proxy in cluster.proxies if proxy is not victim]
        async with flow.through(survivors):
            await flow.reached(range(QUEUES))
            flow.begin_anew()
            killed = time.perf_counter()
            await asyncio.to_thread(victim.kill)
            await flow.reached(theirs)
            found.append(max(flow.first[queue] for queue in theirs) - killed)
        print(f"  kill {number} of {kills}: {found[-1]:.2f} s", flush=True)
        await asyncio.to_thread(victim.start)
    return found


class Flow:
    """Active publishers and poppers, and the time at which each queue's first new message was popped."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self._since = 0.0

    def begin_anew(self) -> None:
        """Count only messages that are published from now on."""
        self._since = time.perf_counter()
        self.first.clear()

    @asynccontextmanager
    async def through(self, ports: Sequence[int]) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._publish(ports[0]))]
            tasks += [group.create_task(self._pop(ports[number % len(ports)])) for number in range(POPPERS)]
            yield
            for task in tasks:
                task.cancel()

    async def reached(self, queues: Iterable[int]) -> None:
        """Return when a message of each of ``queues`` was popped. Raises: TimeoutError."""
        wanted = {*queues}
        await until(lambda: self.first.keys() >= wanted, timeout_seconds=GIVE_UP_SECONDS, what="queues to flow")

    async def _publish(self, port: int) -> None:
        with closing(await load.connect(port)) as connection:
            while True:
                messages = [{"body": repr(time.perf_counter())}] * QUEUES  # one a queue, in turns
                await connection.post("/v1/topics/bench/messages", {"messages": messages})
                await asyncio.sleep(PAUSE_SECONDS)

    async def _pop(self, port: int) -> None:
        with closing(await load.connect(port)) as connection:
            while True:
                answer = await connection.post(f"{load.SUBSCRIPTION}/pop", {"max_messages": 32, "wait_seconds": 5})
                now = time.perf_counter()
                for message in answer["messages"]:
                    if float(message["body"]) > self._since:
                        self.first.setdefault(message["queue"], now)
                if handles := [message["receipt_handle"] for message in answer["messages"]]:
                    await connection.post(f"{load.SUBSCRIPTION}/ack", {"receipt_handles": handles})


def _owners(proxy: ProxyProcess) -> tuple[str, dict[int, str | None]]:
    """Return this proxy's own name, and the owner of each queue of the topic in its view."""
    view = proxy.client.get("/v1/admin/cluster").raise_for_status().json()
    return view["instance"], {queue["queue"]: queue["owner"] for queue in view["queues"]}


def _queues_of(proxy: ProxyProcess) -> list[int]:
    me, owners = _owners(proxy)
    return [queue for queue, owner in owners.items() if owner == me]


def _is_even(cluster: ProxyCluster) -> bool:
    views = [_owners(proxy) for proxy in cluster.proxies]
    counts = Counter(views[0][1].values())
    same = all(owners == views[0][1] for _, owners in views)
    return same and {*counts} == {me for me, _ in views} and {*counts.values()} == {QUEUES // len(views)}
