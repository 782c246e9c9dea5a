"""Members of a cluster share queues, over a real Redis: balanced soon, each queue with one, none moved without need."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from time import monotonic

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.cluster.ownership import Ownership
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import Member
from popgate.runtime.background import Background
from support.audit_client import until
from support.redis import RedisServer

BEAT_SECONDS, GONE_SECONDS = 0.2, 0.6
SETTLED_SECONDS = 5.0
HAND_OVER_SECONDS = 0.02


class Consumed:
    """What RabbitMQ would see: who consumes which queue."""

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
        """What is to be taken again after a loss of data."""

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
        self.consumed.by[queue] = self.me
        self.taken[queue] += 1
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
    def __init__(self, redis: RedisConnection, consumed: Consumed, *, owns: bool = True) -> None:
        self.me = InstanceId(secrets.token_hex(4))
        self.failures: list[BaseException] = []
        self.background = Background(self.failures.append)
        self.claims = RedisClaims(redis, gone_seconds=GONE_SECONDS)
        self.hosts = Hosts(self.me, consumed)
        self.owns = owns
        member = Member(self.me, "http://x", (1, 1), owns)
        self.ownership = Ownership(
            member,
            self.claims,
            self.hosts,
            self.background,
            beat_seconds=BEAT_SECONDS,
            gone_seconds=GONE_SECONDS,
        )

    async def start(self) -> None:
        self.background.spawn(self.claims.hear(), name="hear")
        await self.ownership.start()

    async def stop(self) -> None:
        await self.ownership.stop()
        await self.die()

    async def die(self) -> None:
        """As SIGKILL: nobody is told, and the broker sees its consumers go."""
        await self.background.stop()
        assert not self.failures
        by = self.hosts.consumed.by
        for queue in [queue for queue, who in by.items() if who == self.me]:
            del by[queue]


class Cluster:
    def __init__(self, redis: RedisConnection, stack: AsyncExitStack, count: int) -> None:
        self.redis = redis
        self._stack = stack
        self.consumed = Consumed(count)
        self.proxies: list[Proxy] = []

    async def join(self, *, owns: bool = True) -> Proxy:
        proxy = Proxy(self.redis, self.consumed, owns=owns)
        await proxy.start()
        self._stack.push_async_callback(proxy.die)
        self.proxies.append(proxy)
        return proxy

    def took_again(self, before: Mapping[BrokerQueue, InstanceId], losses: int) -> bool:
        """Whether each has taken what it had `before` after each of so many losses of data."""
        return all(
            proxy.hosts.losses == losses
            and dict(proxy.hosts.taken) == {queue: losses for queue, who in before.items() if who == proxy.me}
            for proxy in self.proxies
        )

    async def settled(self) -> float:
        """Return when all queues are consumed, evenly; how long it took."""
        started = monotonic()
        size = sum(proxy.owns for proxy in self.proxies)
        share, extra = divmod(len(self.consumed.queues), size)
        even = [share] * (size - extra) + [share + 1] * extra
        wanted = [count for count in even if count]
        with suppress(TimeoutError):
            await until(lambda: self.consumed.counts() == wanted, timeout_seconds=SETTLED_SECONDS, what="balance")
        assert self.consumed.counts() == wanted
        assert sorted(self.consumed.by) == self.consumed.queues
        return monotonic() - started


@pytest.fixture
async def cluster(redis_server: RedisServer) -> AsyncIterator[Callable[[int], Cluster]]:
    async with AsyncExitStack() as stack:
        redis = RedisConnection(parse_address(redis_server.url()), secrets.token_hex(4))
        stack.push_async_callback(redis.close)
        yield lambda count: Cluster(redis, stack, count)


@pytest.mark.parametrize("count", [1, 8, 100])
async def test_joins_and_leaves_move_as_few_as_can_be(cluster: Callable[[int], Cluster], count: int) -> None:
    several = cluster(count)
    moved = several.consumed.handed_over
    for size in range(1, 6):
        await several.join()
        await several.settled()
        assert moved.total() == (count // size if size > 1 else 0)
        assert all(times == 1 for times in moved.values())
        moved.clear()
    while len(several.proxies) > 1:
        leaving = several.proxies.pop(0)
        had = sum(who == leaving.me for who in several.consumed.by.values())
        await leaving.stop()
        await several.settled()
        assert moved.total() == had
        moved.clear()
    assert not several.consumed.lost


async def test_many_join_at_once(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(60)
    await several.join()
    await several.settled()
    await asyncio.gather(*(several.join() for _ in range(5)))
    await several.settled()
    await asyncio.sleep(2 * BEAT_SECONDS)
    assert several.consumed.counts() == [10] * 6
    assert not several.consumed.lost


async def test_the_queues_of_one_that_dies_go_to_the_others(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(30)
    for _ in range(3):
        await several.join()
    await several.settled()
    several.consumed.handed_over.clear()
    await several.proxies.pop(1).die()
    assert await several.settled() < GONE_SECONDS + 3 * BEAT_SECONDS + 1
    assert not several.consumed.handed_over, "nobody gives up what it has"


async def test_one_that_was_taken_for_dead_lets_go_and_joins_again(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(30)
    for _ in range(3):
        await several.join()
    await several.settled()
    hung = several.proxies[0]
    had = [queue for queue, who in several.consumed.by.items() if who == hung.me]
    for queue in had:  # RabbitMQ has closed its connection
        del several.consumed.by[queue]
    await several.proxies[1].claims.remove(hung.me)
    await several.settled()
    assert len(hung.ownership.view.members) == 3


async def test_queues_come_and_go(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(10)
    for _ in range(2):
        await several.join()
    await several.settled()
    several.consumed.queues += [BrokerQueue(f"r{number}") for number in range(10)]
    for proxy in several.proxies:
        proxy.ownership.queues_changed()
    await several.settled()
    assert not several.consumed.handed_over
    del several.consumed.queues[:7]
    await several.settled()


async def test_a_member_that_owns_nothing_takes_no_queue(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(9)
    edges = [await several.join(owns=False) for _ in range(2)]
    await asyncio.sleep(3 * BEAT_SECONDS)
    assert not several.consumed.by, "where nobody takes queues they belong to nobody"
    owners = [await several.join() for _ in range(2)]
    await several.settled()
    assert {*several.consumed.by.values()} == {owner.me for owner in owners}
    assert len(edges[0].ownership.view.members) == 4
    for leaving in (edges[0], owners[0]):
        several.proxies.remove(leaving)
        await leaving.stop()
        await several.settled()
    several.proxies.remove(owners[1])
    await owners[1].stop()
    await asyncio.sleep(3 * BEAT_SECONDS)
    assert not several.consumed.by
    assert not several.consumed.lost
    await several.join()
    await several.settled()


async def test_after_a_loss_of_data_each_keeps_what_it_has_and_takes_it_once_more(
    cluster: Callable[[int], Cluster],
) -> None:
    several = cluster(30)
    for _ in range(3):
        await several.join()
    await several.settled()
    before = dict(several.consumed.by)
    several.consumed.handed_over.clear()
    for proxy in several.proxies:
        several.redis.on_data_loss(proxy.ownership.data_lost)
        proxy.hosts.taken.clear()
    for losses in (1, 2):
        await several.redis.command("FLUSHDB")
        await until(
            partial(several.took_again, before, losses),
            timeout_seconds=SETTLED_SECONDS,
            what="all to take again what they have",
        )
    await asyncio.sleep(3 * BEAT_SECONDS)
    assert several.consumed.by == before
    assert not several.consumed.lost
    assert not several.consumed.handed_over
    for proxy in several.proxies:
        assert proxy.ownership.view.owners == before


async def test_what_belonged_to_one_that_does_not_come_back_after_a_loss_of_data_goes_to_the_others(
    cluster: Callable[[int], Cluster],
) -> None:
    several = cluster(30)
    for _ in range(3):
        await several.join()
    await several.settled()
    for proxy in several.proxies[1:]:
        several.redis.on_data_loss(proxy.ownership.data_lost)
    several.consumed.handed_over.clear()
    dead = several.proxies.pop(0)
    await dead.background.stop()
    await several.redis.command("FLUSHDB")
    began = monotonic()
    await until(
        lambda: all(len(proxy.ownership.view.members) == 2 for proxy in several.proxies),
        timeout_seconds=SETTLED_SECONDS,
        what="the others to join again",
    )
    await dead.die()
    await several.settled()
    assert monotonic() - began > GONE_SECONDS / 2, "it had time to come back"
    assert not several.consumed.handed_over
    assert not several.consumed.lost
