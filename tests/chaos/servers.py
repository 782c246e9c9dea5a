"""All parts of popgate's cluster, each of which can be killed, paused, restarted and cut off.

This module owns the processes and how they come back; the nemesis decides which fault happens when.
"""

import asyncio
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from chaos.policies import CHECK_SECONDS, Operator
from popgate.adapters.rabbitmq.partition_detector import QUEUE as PULSE
from support.audit import Audit
from support.processes import ServerFailedError, Startable, accepts
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitCluster, RabbitSettings
from support.rabbitmq_releases import RabbitRelease
from support.redis import RedisServer
from support.wall_clock import WallClock

PROXIES, NODES = 3, 3
JOURNAL = "journal"
"""Folder, in the run's folder, of the proxies' journal, for an audit by the journal alone."""
SETTINGS = RabbitSettings(dead_letter_confirm_seconds=3.0)
"""The default of three minutes is too long for delayed messages that were on their way when a node was killed."""
BACK_SECONDS_MAX = 120.0
"""Maximum seconds for a part to come back, on a busy machine."""
WATCH_SECONDS = 0.3
TRACEBACK = re.compile(r"^.*\n( *)Traceback \(most recent call last\):\n(?:\1 .*\n)*(.*)$", re.MULTILINE)
"""Matches a traceback with the line before it, which may name the operation; the second group is its last line."""
TRACEBACK_SHOWN_CHARACTERS = 4_000
PEOPLE, CUT = (b"normal", b"pubsub"), b"CLIENT KILL TYPE %b SKIPME yes\r\n"
"""The client types that Redis can cut off, and the command."""


class ChaosServers(Startable):
    """Three proxies, three RabbitMQ nodes, and one Redis that syncs to disk before every answer.

    `release` is that of RabbitMQ; the newest if None.

    All disturbances are recorded in `audit`. A proxy that ends unexpectedly is noted in `ended`.
    """

    def __init__(self, folder: Path, audit: Audit, *, release: RabbitRelease | None = None) -> None:
        self.audit = audit
        self.rabbit = RabbitCluster(folder / "rabbitmq", release=release, size=NODES, settings=SETTINGS)
        self.redis = RedisServer(folder / "redis", {"appendfsync": "always"})
        self._clocks = [WallClock(folder / "clocks" / f"{number}") for number in range(PROXIES)]
        self.proxies = ProxyCluster(
            folder / "proxies",
            *("--journal", str(folder / JOURNAL), "--journal-rotate-seconds", "1"),
            *("--management-url", ",".join(node.management_url for node in self.rabbit.nodes)),
            *("--policy-check-seconds", f"{CHECK_SECONDS:g}"),
            nodes=self.rabbit.nodes,
            redis=self.redis,
            size=PROXIES,
            environments=[clock.environment for clock in self._clocks],
        )
        self.operator = Operator(self.rabbit, self.proxies, audit)
        self.ended: list[str] = []
        self.failed_starts = 0
        self._meant_to_be_down: set[ProxyProcess] = set()
        self._stack = ExitStack()

    def start(self) -> None:
        """Return when all are ready. Raises: ServerFailedError, TimeoutError."""
        for part in (self.rabbit, self.redis, self.proxies):
            self._stack.enter_context(part)

    def close(self) -> None:
        for server in (self.redis, *self.rabbit.nodes, *self.proxies.proxies):
            if server.is_running():
                server.resume()
        self._stack.close()

    # ------------------------------------------------------------ proxies

    async def kill_proxy(self, number: int, down_seconds: float) -> None:
        proxy = self.proxies.proxies[number]
        self._meant_to_be_down.add(proxy)
        try:
            await asyncio.to_thread(proxy.kill)
            self.audit.mark(f"killed {proxy.name}")
            await asyncio.sleep(down_seconds)
        finally:
            self._meant_to_be_down.discard(proxy)
        await self._start(proxy)

    async def pause_proxy(self, number: int, seconds: float) -> None:
        proxy = self.proxies.proxies[number]
        if not proxy.is_running():
            return
        await asyncio.to_thread(proxy.pause)
        self.audit.mark(f"paused {proxy.name}")
        await asyncio.sleep(seconds)
        proxy.resume()
        self.audit.mark(f"resumed {proxy.name}")

    async def set_clock(self, number: int, ahead_seconds: float, seconds: float) -> None:
        """Step the wall clock of a proxy's machine; it steps back later."""
        proxy = self.proxies.proxies[number]
        self._clocks[number].set(ahead_seconds)
        self.audit.mark(f"the clock of {proxy.name} is off by {ahead_seconds:g} s")
        await asyncio.sleep(seconds)
        self._clocks[number].set(0.0)
        self.audit.mark(f"the clock of {proxy.name} is right again")

    async def restart_proxy(self, number: int) -> None:
        proxy = self.proxies.proxies[number]
        self._meant_to_be_down.add(proxy)
        try:
            self.audit.mark(f"SIGTERM to {proxy.name}")
            try:
                status = await asyncio.to_thread(proxy.stop)
            except ServerFailedError as error:
                self.ended.append(f"{proxy.name} did not stop in order: {error}")
                await asyncio.to_thread(proxy.kill)
            else:
                if status != 0:
                    self.ended.append(str(proxy.failure(f"ended with {status} when it was told to stop")))
            self.audit.mark(f"{proxy.name} has stopped")
        finally:
            self._meant_to_be_down.discard(proxy)
        await self._start(proxy)

    async def _start(self, proxy: ProxyProcess) -> None:
        """Start it until it is ready: while RabbitMQ or Redis is away it may refuse to start."""
        for _ in range(int(BACK_SECONDS_MAX)):
            try:
                await asyncio.to_thread(proxy.launch)
                await asyncio.to_thread(proxy.wait_ready)
            except ServerFailedError:
                self.failed_starts += 1
                await asyncio.sleep(WATCH_SECONDS)
            else:
                self.audit.mark(f"{proxy.name} is up")
                return
        raise proxy.failure("does not come back")

    async def watch(self, is_busy: Callable[[int], bool]) -> None:
        """Restart proxies that have ended unexpectedly, and note them. Never returns."""
        while True:
            for number, proxy in enumerate(self.proxies.proxies):
                if not is_busy(number) and proxy not in self._meant_to_be_down and not proxy.is_running():
                    self.ended.append(str(proxy.failure("has ended by itself")))
                    self.audit.mark(f"{proxy.name} has ended by itself")
                    await self._start(proxy)
            await asyncio.sleep(WATCH_SECONDS)

    # ------------------------------------------------------------ RabbitMQ

    async def kill_node(self, number: int, down_seconds: float) -> None:
        """Kill a node; return when the cluster is whole again."""
        node = self.rabbit.nodes[number]
        await asyncio.to_thread(node.sync)
        await asyncio.to_thread(node.kill)
        self.audit.mark(f"killed {node.name}")
        await asyncio.sleep(down_seconds)
        await asyncio.to_thread(node.start)
        await asyncio.to_thread(self.rabbit.wait_whole)
        self.audit.mark(f"{node.name} is up")

    async def pause_node(self, number: int, seconds: float) -> None:
        """Pause a node; return when the others can work with it again."""
        node = self.rabbit.nodes[number]
        await asyncio.to_thread(node.pause)
        self.audit.mark(f"paused {node.name}")
        await asyncio.sleep(seconds)
        node.resume()
        self.audit.mark(f"resumed {node.name}")
        await asyncio.to_thread(self.rabbit.wait_whole)

    async def cut_amqp(self, number: int) -> None:
        """Cut every AMQP connection at one moment."""
        self.audit.mark("AMQP connections are being cut")
        await asyncio.to_thread(self.rabbit.nodes[number].close_connections, self.proxies.vhost)
        self.audit.mark("AMQP connections were cut")

    def left_on_rabbitmq(self) -> dict[str, int]:
        """Return how many client messages RabbitMQ itself has, by queue, dead letters excluded."""
        node = next((node for node in self.rabbit.nodes if node.running_nodes()), None)
        rows = [] if node is None else node.queues(self.proxies.vhost)
        left = {row["name"]: row["messages"] for row in rows if row.get("messages")}
        return {name: count for name, count in left.items() if name != PULSE and not name.endswith(":dead")}

    # ------------------------------------------------------------ Redis

    async def kill_redis(self, down_seconds: float, *, power: bool = False) -> None:
        """Kill the process, or cut the power of its machine."""
        await asyncio.to_thread(self.redis.cut_power if power else self.redis.kill)
        self.audit.mark("cut the power of Redis" if power else "killed Redis")
        await asyncio.sleep(down_seconds)
        await asyncio.to_thread(self.redis.start)
        self.audit.mark("Redis is up")

    async def pause_redis(self, seconds: float) -> None:
        await asyncio.to_thread(self.redis.pause)
        self.audit.mark("paused Redis")
        await asyncio.sleep(seconds)
        self.redis.resume()
        self.audit.mark("resumed Redis")

    async def restart_redis(self) -> None:
        self.audit.mark("SIGTERM to Redis")
        await asyncio.to_thread(self.redis.restart)
        self.audit.mark("Redis is up")

    async def cut_redis(self) -> None:
        """Cut every connection to Redis."""
        for people in PEOPLE:
            await asyncio.to_thread(accepts, self.redis.port, say=CUT % people, expect=b":")
        self.audit.mark("Redis connections were cut")

    # ------------------------------------------------------------ what they met

    def tracebacks(self) -> list[str]:
        """Return unforeseen errors: each kind of traceback in the proxies' logs, by its last line, once."""
        found: dict[str, str] = {}
        for proxy in self.proxies.proxies:
            log = (proxy.folder / "output.log").read_text(errors="replace")
            for match in TRACEBACK.finditer(log):
                found.setdefault(match[2], f"{proxy.name}: {match[0][-TRACEBACK_SHOWN_CHARACTERS:]}")
        return [*found.values()]
