"""Members that share queues over a real Redis, in one process, with plain numbers as queues.

All decisions are made by the product's code; what RabbitMQ would see is recorded instead of consumed.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from time import monotonic

from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.cluster.ownership import Ownership
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import BEAT_SECONDS, GONE_SECONDS, Member
from popgate.runtime.background import Background
from support.audit_client import until

SETTLED_SECONDS = 5.0
HAND_OVER_SECONDS = 0.02


class Consumed:
    """The view of RabbitMQ: which member consumes which queue."""

    def __init__(self, count: int) -> None:
        self.queues = [BrokerQueue(f"q{number:04}") for number in range(count)]
        self.by: dict[BrokerQueue, InstanceId] = {}
        self.handed_over: Counter[BrokerQueue] = Counter()
        self.lost: Counter[BrokerQueue] = Counter()

    def counts(self) -> list[int]:
        return sorted(Counter(self.by.values()).values())


class Hosts:
    """The queues of one member."""

    def __init__(self, me: InstanceId, consumed: Consumed) -> None:
        self.me = me
        self.consumed = consumed
        self.reviews = 0
        self.losses = 0
        self.taken: Counter[BrokerQueue] = Counter()
        self.stale: set[BrokerQueue] = set()
        """Queues that must be claimed again after a loss of data."""
        self.unreadable: set[BrokerQueue] = set()
        """Queues of which the store has something that can't be read."""

    def queues(self) -> Collection[BrokerQueue]:
        return self.consumed.queues

    def served(self) -> Collection[BrokerQueue]:
        return self._mine() - self.stale

    def lost(self) -> Collection[BrokerQueue]:
        return self._mine() & self.stale

    def _mine(self) -> set[BrokerQueue]:
        return {queue for queue, by in self.consumed.by.items() if by == self.me}

    async def take(self, queue: BrokerQueue) -> None:
        await asyncio.sleep(0)
        assert self.consumed.by.get(queue, self.me) == self.me, "somebody has it"
        self.taken[queue] += 1
        if queue in self.unreadable:
            raise ValueError("a record can't be read")
        self.consumed.by[queue] = self.me
        self.stale.discard(queue)

    async def hand_over(self, queue: BrokerQueue) -> None:
        await asyncio.sleep(HAND_OVER_SECONDS)
        if self.consumed.by.get(queue) == self.me:
            del self.consumed.by[queue]
            self.consumed.handed_over[queue] += 1

    def review(self) -> None:
        self.reviews += 1

    def data_lost(self) -> None:
        self.losses += 1
        self.stale = self._mine()

    def lose(self, queue: BrokerQueue) -> None:
        if self.consumed.by.get(queue) == self.me:
            del self.consumed.by[queue]
            self.consumed.lost[queue] += 1


class Proxy:
    """A member. ``beat_seconds`` and ``gone_seconds`` are those of the claims port."""

    def __init__(
        self,
        redis: RedisConnection,
        consumed: Consumed,
        *,
        beat_seconds: float,
        gone_seconds: float,
        owns: bool = True,
        protocols: tuple[int, int] = (1, 1),
    ) -> None:
        self.me = InstanceId(secrets.token_hex(4))
        self.failures: list[BaseException] = []
        self.background = Background(self.failures.append)
        self.claims = RedisClaims(redis, gone_seconds=gone_seconds)
        self.hosts = Hosts(self.me, consumed)
        self.owns = owns
        member = Member(self.me, "http://x", protocols, owns)
        self.ownership = Ownership(
            member,
            self.claims,
            self.hosts,
            self.background,
            beat_seconds=beat_seconds,
            gone_seconds=gone_seconds,
        )

    async def start(self) -> None:
        self.background.spawn(self.claims.listen(), name="hear")
        await self.ownership.start()

    async def stop(self) -> None:
        await self.ownership.stop()
        await self.die()

    async def die(self) -> None:
        """End as by SIGKILL: no other member is notified, and the broker sees its consumers disappear."""
        await self.background.stop()
        assert not self.failures
        by = self.hosts.consumed.by
        for queue in [queue for queue, who in by.items() if who == self.me]:
            del by[queue]


class Cluster:
    """A number of queues, and members that come and go; ``stack`` ends them."""

    def __init__(
        self,
        redis: RedisConnection,
        stack: AsyncExitStack,
        count: int,
        *,
        beat_seconds: float = BEAT_SECONDS,
        gone_seconds: float = GONE_SECONDS,
    ) -> None:
        self.redis = redis
        self._beats = {"beat_seconds": beat_seconds, "gone_seconds": gone_seconds}
        self._stack = stack
        self.consumed = Consumed(count)
        self.proxies: list[Proxy] = []

    async def join(self, *, owns: bool = True, protocols: tuple[int, int] = (1, 1)) -> Proxy:
        proxy = Proxy(self.redis, self.consumed, owns=owns, protocols=protocols, **self._beats)
        self._stack.push_async_callback(proxy.die)
        await proxy.start()
        self.proxies.append(proxy)
        return proxy

    def took_again(self, before: Mapping[BrokerQueue, InstanceId], losses: int) -> bool:
        """Tell whether each member has claimed its queues of `before` again after this many losses of data."""
        return all(
            proxy.hosts.losses == losses
            and dict(proxy.hosts.taken) == {queue: losses for queue, who in before.items() if who == proxy.me}
            for proxy in self.proxies
        )

    async def settled(self, seconds: float = SETTLED_SECONDS) -> float:
        """Wait up to the limit until all queues are consumed evenly; return the seconds it took."""
        started = monotonic()
        size = sum(proxy.owns for proxy in self.proxies)
        share, extra = divmod(len(self.consumed.queues), size)
        even = [share] * (size - extra) + [share + 1] * extra
        wanted = [count for count in even if count]
        with suppress(TimeoutError):
            await until(lambda: self.consumed.counts() == wanted, timeout_seconds=seconds, what="balance")
        assert self.consumed.counts() == wanted
        assert sorted(self.consumed.by) == self.consumed.queues
        return monotonic() - started
