"""One proxy of the simulation: assembled as ``bootstrap`` does it, over the simulated servers.

This module owns the order of its start and stop. Everything above the ports is production code, and so are the Redis
adapters.
"""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# A PipelinedConnection makes its connections from a pool, which is replaced here.

import asyncio
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import ConnectionPool

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.assignments import RedisAssignments
from popgate.adapters.redis.catalog import RedisCatalog
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.dedup import RedisDedupStore
from popgate.adapters.redis.lease_groups import RedisLeaseGroups
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.adapters.redis.limits import RedisLimits
from popgate.cluster.member_watch import MemberWatch
from popgate.cluster.ownership import Ownership
from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineOptions, make_context
from popgate.engine.context.routing import Cluster
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.ports.claims import Member
from popgate.runtime.background import Background
from popgate.wire.codec import CODEC
from simulator.broker import SimulatedBroker
from simulator.broker_server import BrokerServer
from simulator.loop import VirtualClock, VirtualLoop
from simulator.network import Network
from simulator.peers import Address, SimulatedPeers
from simulator.processes import Process
from simulator.redis_line import RedisServer, SimulatedPool
from simulator.wires import Weather

GRACE_SECONDS, PART_SECONDS = 1.0, 0.3
"""Seconds, as in ``bootstrap``."""
REDIS = parse_address("redis://simulated:6379")
SECRET = b"a secret of the simulation alone, long enough"
BUFFER_BYTES = 256 * 1024
WALL = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers that all proxies share."""

    loop: VirtualLoop
    chance: random.Random
    network: Network
    broker: BrokerServer
    redis: RedisServer
    addresses: dict[InstanceId, Address]
    failures: list[str]


class Proxy:
    """One start of a process. ``name`` is never reused."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.me = InstanceId(name)
        self.process = Process(servers.loop, name)
        self.weather = Weather(servers.chance)
        self.is_up = False
        self._servers = servers
        self._background = Background(self._note_failure)
        zero = servers.chance.uniform(-500.0, 500.0)
        self.clock = VirtualClock(servers.loop, zero=zero, wall=WALL)
        self._redis = RedisConnection(REDIS)
        self._redis._pipeline._pool = cast("ConnectionPool", SimulatedPool(servers.redis, self.process, self.weather))
        self._catalog, self._claims = RedisCatalog(self._redis), RedisClaims(self._redis)
        self.broker = SimulatedBroker(servers.broker, self.weather, servers.chance.uniform, self.process.context)
        room = make_context(
            EngineOptions(instance=name, secrets=[SECRET], auto_create=False, buffer_bytes_max=BUFFER_BYTES),
            broker=self.broker,
            leases=RedisLeaseStore(self._redis),
            lease_groups=RedisLeaseGroups(self._redis),
            assignments=RedisAssignments(self._redis),
            dedup=RedisDedupStore(self._redis),
            catalog=self._catalog,
            journal=EventCounters(),
            clock=self.clock,
            background=self._background,
        )
        self.engine = Engine(room)
        self.peers = SimulatedPeers(self.me, self.process, servers.network, servers.addresses, self._members)
        member_watch = MemberWatch(self.me, self._claims, self._background, self.peers.died)
        self.ownership = Ownership(
            Member(self.me, f"http://{name}", CODEC.protocols),
            self._claims,
            self.engine.hosting,
            self._background,
            member_watch=member_watch,
        )
        self._redis.on_data_loss(self.ownership.data_lost)
        ownership = self.ownership
        room.router.join(
            Cluster(
                me=self.me,
                ownership=ownership,
                peers=self.peers,
                version=self.peers.version,
                limits=RedisLimits(self._redis),
            )
        )
        self.address = servers.addresses[self.me] = Address(self.process)

    def _members(self) -> Mapping[InstanceId, Member]:
        return self.ownership.view.members

    def _note_failure(self, error: BaseException) -> None:
        self._servers.failures.append(f"{self.me}: a background task failed: {error!r}")

    # -- life, in the process -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serve; end the process if it can't start."""
        try:
            await self._redis.cluster()
            self._background.spawn(self._redis.watch(), name="watch Redis")
            self._servers.redis.listen(
                self.process, self.weather, self._redis.prefix, self._catalog.signal, self._claims.signal
            )
            await self.broker.start()
            await self.engine.start()
            await self.ownership.start()
        except PopgateError:
            self._end()
            return
        self.address.answers = self.engine.peering
        self.is_up = True

    async def leave(self) -> None:
        """Stop in order, as after SIGTERM."""
        self.address.is_leaving = True
        await in_time(self.engine.drain(), GRACE_SECONDS)
        self.is_up = False
        await in_time(self.engine.stop(), PART_SECONDS)
        await in_time(self.broker.stop(), PART_SECONDS)
        await self._redis.close()
        self._end()

    # -- what is done to it ---------------------------------------------------------------------------------------

    def kill(self, *, loses: int | None = 0) -> None:
        """End the process as by SIGKILL. This many of the latest messages to RabbitMQ never leave the machine (None:
        all).
        """
        for connection in self.broker.connections():
            connection.cut(loses=loses)
        self._end()

    def cut_broker(self, *, loses: int | None) -> None:
        """Cut its connections to RabbitMQ."""
        for connection in self.broker.connections():
            connection.cut(loses=loses)

    def _end(self) -> None:
        self.is_up = False
        self.process.kill()


async def in_time(work: Coroutine[Any, Any, None], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return
