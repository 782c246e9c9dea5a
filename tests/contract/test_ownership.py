"""Members of a cluster share queues, over a real Redis: soon balanced, each queue with one owner, none moved without
need.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from time import monotonic

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.cluster import ownership
from popgate.domain.errors import NoCommonVersion
from popgate.domain.names import BrokerQueue
from support.audit_client import until
from support.owners import SETTLED_SECONDS, Cluster
from support.redis import RedisServer

BEAT_SECONDS, GONE_SECONDS = 0.2, 0.6


@pytest.fixture
async def cluster(redis_server: RedisServer) -> AsyncIterator[Callable[[int], Cluster]]:
    async with AsyncExitStack() as stack:
        redis = RedisConnection(parse_address(redis_server.url()), secrets.token_hex(4))
        stack.push_async_callback(redis.close)
        yield lambda count: Cluster(redis, stack, count, beat_seconds=BEAT_SECONDS, gone_seconds=GONE_SECONDS)


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


async def test_a_member_loses_the_queues_that_others_own_by_now(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(10)
    one, other = [await several.join() for _ in range(2)]
    await several.settled()
    queue = next(queue for queue, who in several.consumed.by.items() if who == one.me)
    prefix = several.redis.prefix
    await several.redis.command("HSET", f"{prefix}owners", queue, other.me)
    await several.redis.command("INCR", f"{prefix}view")
    one.ownership.queues_changed()
    await until(lambda: several.consumed.lost[queue] == 1, timeout_seconds=SETTLED_SECONDS, what="the queue to be lost")
    await several.settled()


async def test_one_that_speaks_no_version_of_the_others_stays_outside_and_they_see_nothing_of_it(
    cluster: Callable[[int], Cluster],
) -> None:
    several = cluster(30)
    for protocols in ((1, 2), (1, 3)):
        await several.join(protocols=protocols)
    await several.settled()
    several.consumed.handed_over.clear()
    views = [proxy.ownership.view for proxy in several.proxies]
    with pytest.raises(NoCommonVersion) as caught:
        await several.join(protocols=(3, 3))
    line = caught.value.detail
    assert f"version 3 of the peer protocol, but the cluster has {several.proxies[0].me}" in line
    assert several.proxies[1].me not in line
    await asyncio.sleep(GONE_SECONDS + 2 * BEAT_SECONDS)
    assert [proxy.ownership.view.members for proxy in several.proxies] == [view.members for view in views]
    assert not several.consumed.handed_over
    await several.settled()


async def test_one_that_waits_for_those_in_its_way_to_be_gone_is_let_in_then(cluster: Callable[[int], Cluster]) -> None:
    several = cluster(30)
    await several.join(protocols=(1, 1))
    await several.settled()
    await several.proxies.pop().die()
    await several.join(protocols=(2, 2))
    await several.settled()


async def test_one_that_was_taken_for_dead_while_the_others_were_upgraded_beyond_it_keeps_trying(
    cluster: Callable[[int], Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    several = cluster(30)
    hung = await several.join(protocols=(1, 1))
    await several.settled()
    for queue in hung.hosts.served():  # RabbitMQ has closed its connection
        del several.consumed.by[queue]
    assert hung.ownership.unready_reason() is None
    await hung.claims.remove(hung.me)
    await several.join(protocols=(2, 2))
    await until(
        lambda: hung.ownership.unready_reason() is not None,
        timeout_seconds=SETTLED_SECONDS,
        what="the proxy not to be ready",
    )
    assert "version 1 of the peer protocol, but the cluster has" in str(hung.ownership.unready_reason())
    several.proxies.remove(hung)
    await several.settled()
    await asyncio.sleep(2 * GONE_SECONDS)
    assert hung.failures == []
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["the cluster does not accept this proxy any more: trying again"]
    await several.proxies.pop().stop()
    several.proxies.append(hung)
    await several.settled()
    assert hung.ownership.unready_reason() is None


async def test_one_that_is_refused_after_a_loss_of_data_keeps_trying_until_the_stranger_is_silent(
    cluster: Callable[[int], Cluster],
) -> None:
    several = cluster(30)
    one = await several.join()
    await several.settled()
    several.redis.on_data_loss(one.ownership.data_lost)
    await several.redis.command("FLUSHDB")
    stranger = '["https://127.0.0.1:1",[9,9],true]'
    await several.redis.command("HSET", f"{several.redis.prefix}members", "stranger", stranger)
    await until(
        lambda: one.ownership.unready_reason() is not None,
        timeout_seconds=SETTLED_SECONDS,
        what="the proxy not to be ready",
    )
    await until(
        lambda: one.ownership.unready_reason() is None, timeout_seconds=SETTLED_SECONDS, what="the stranger's silence"
    )
    await several.settled()
    assert one.failures == []


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


async def test_a_claim_that_the_store_has_lost_is_made_again(cluster: Callable[[int], Cluster]) -> None:
    """A failover of Redis to a replica may lose the last changes that were answered."""
    several = cluster(4)
    for _ in range(2):
        await several.join()
    await several.settled()
    redis, second = several.redis, several.proxies[1]
    queue = next(queue for queue, owner in several.consumed.by.items() if owner == second.me)
    for lost in (["HDEL", f"{redis.prefix}owners", queue], ["DECR", f"{redis.prefix}view"]):
        await redis.command(*lost)
    await asyncio.sleep(2 * BEAT_SECONDS)
    await several.settled()
    await until(
        lambda: all(queue in proxy.ownership.view.owners for proxy in several.proxies),
        timeout_seconds=SETTLED_SECONDS,
        what="the queue to have an owner again",
    )


async def test_a_queue_that_can_not_be_taken_costs_the_others_nothing(
    cluster: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "FAILED_SECONDS", 0.5)
    several = cluster(4)
    bad = several.consumed.queues[0]
    proxy = await several.join()
    await several.settled()
    proxy.hosts.unreadable.add(bad)
    del several.consumed.by[bad]
    proxy.hosts.taken.clear()
    await asyncio.sleep(1.2)
    assert 2 <= proxy.hosts.taken[bad] <= 3, "it is tried again, after a pause"
    assert len(proxy.failures) == proxy.hosts.taken[bad], "and each failure is told"
    proxy.failures.clear()
    assert sorted(several.consumed.by) == several.consumed.queues[1:]
    proxy.hosts.unreadable.clear()
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
