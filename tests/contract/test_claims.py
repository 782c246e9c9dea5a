"""The claims of a cluster, on a real Redis."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.domain.errors import NotAMember, StateUnavailable
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import Member
from popgate.runtime.background import Background
from support.redis import RedisServer

GONE_SECONDS = 0.3
A, B = (Member(InstanceId(name), f"http://{name}:8080", (1, 2)) for name in "ab")
Q1, Q2, Q3 = (BrokerQueue(f"q{number}") for number in (1, 2, 3))


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisConnection]:
    redis = RedisConnection(parse_address(redis_server.url()), secrets.token_hex(4))
    yield redis
    await redis.close()


@pytest.fixture
async def claims(redis: RedisConnection) -> AsyncIterator[RedisClaims]:
    claims = RedisClaims(redis, gone_seconds=GONE_SECONDS)
    background = Background()
    background.spawn(claims.hear(), name="hear")
    yield claims
    await background.stop()


async def test_who_joins_is_seen_with_all_that_he_says(claims: RedisClaims) -> None:
    first = await claims.join(A)
    assert first.members == {A.instance: A}
    assert await claims.beat(A.instance, first.version) is None
    both = await claims.join(B)
    assert list(both.members.items()) == [(A.instance, A), (B.instance, B)]
    assert await claims.beat(A.instance, first.version) == both
    again = await claims.join(B)
    assert again == both
    edge = Member(InstanceId("edge"), "http://edge:8080", (1, 2), owns=False)
    assert (await claims.join(edge)).members[edge.instance] == edge


async def test_a_member_that_does_not_say_whether_it_owns_queues_does(
    claims: RedisClaims, redis: RedisConnection
) -> None:
    await claims.join(A)
    await redis.run("join", B.instance, GONE_SECONDS, '["http://b:8080",[1,2]]')
    view = await claims.beat(A.instance, -1)
    assert view is not None
    assert view.members[B.instance] == B
    assert B.owns


async def test_a_queue_belongs_to_one(claims: RedisClaims) -> None:
    await claims.join(A)
    await claims.join(B)
    assert (await claims.claim(A.instance, [Q1, Q2]))[0] == [Q1, Q2]
    taken, version = await claims.claim(B.instance, [Q1, Q2, Q3])
    assert taken == [Q3]
    assert await claims.claim(A.instance, [Q1]) == ([Q1], version)
    view = await claims.beat(A.instance, -1)
    assert view is not None
    assert view.version == version
    assert view.owners == {Q1: A.instance, Q2: A.instance, Q3: B.instance}
    assert view.owned_by(A.instance) == {Q1, Q2}
    released = await claims.release(B.instance, [Q1, Q3])
    view = await claims.beat(A.instance, view.version)
    assert view is not None
    assert view.version == released
    assert view.owners == {Q1: A.instance, Q2: A.instance}


async def test_who_is_removed_owns_nothing_and_hears_it(claims: RedisClaims) -> None:
    await claims.join(A)
    await claims.join(B)
    await claims.claim(A.instance, [Q1])
    await claims.remove(A.instance)
    await claims.remove(A.instance)
    with pytest.raises(NotAMember, match="joins again"):
        await claims.beat(A.instance, 0)
    with pytest.raises(NotAMember):
        await claims.claim(A.instance, [Q2])
    view = await claims.beat(B.instance, 0)
    assert view is not None
    assert view.members == {B.instance: B}
    assert view.owners == {}
    assert (await claims.join(A)).owners == {}


async def test_who_is_silent_for_too_long_is_gone(claims: RedisClaims) -> None:
    await claims.join(A)
    view = await claims.join(B)
    await claims.claim(A.instance, [Q1])
    async with asyncio.timeout(5):
        while len(view.members) > 1:
            await asyncio.sleep(GONE_SECONDS / 5)
            view = await claims.beat(B.instance, view.version) or view
    assert view.members.keys() == {B.instance}
    assert view.owners == {}


async def test_silence_does_not_count_while_nobody_could_be_heard(claims: RedisClaims) -> None:
    """As after an outage of Redis: who comes back first is not the only one that lives."""
    await claims.join(A)
    view = await claims.join(B)
    await claims.claim(A.instance, [Q1])
    await asyncio.sleep(GONE_SECONDS * 1.5)
    view = await claims.beat(B.instance, view.version) or view
    assert view.owners == {Q1: A.instance}
    assert await claims.beat(A.instance, view.version) is None
    began = monotonic()
    async with asyncio.timeout(5):
        while len(view.members) > 1:
            await asyncio.sleep(GONE_SECONDS / 5)
            view = await claims.beat(B.instance, view.version) or view
    assert monotonic() - began >= GONE_SECONDS


async def test_who_joins_again_keeps_what_belongs_to_nobody(claims: RedisClaims) -> None:
    await claims.join(A)
    assert (await claims.join(B, [Q1, Q2])).owners == {Q1: B.instance, Q2: B.instance}
    view = await claims.join(A, [Q2, Q3])
    assert view.owners == {Q1: B.instance, Q2: B.instance, Q3: A.instance}
    assert await claims.join(A, [Q2, Q3]) == view


async def test_changes_are_heard(claims: RedisClaims) -> None:
    async with asyncio.timeout(5):
        await claims.changed()  # before it listened
        view = await claims.join(A)
        await claims.changed()
        await claims.claim(A.instance, [Q1])
        await claims.changed()
        await claims.release(A.instance, [Q1])
        await claims.changed()
        await claims.remove(A.instance)
        await claims.changed()
        view = await claims.join(A)
        await claims.changed()
    await claims.claim(A.instance, [])
    await claims.release(A.instance, [Q1])
    assert await claims.beat(A.instance, view.version) is None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await claims.changed()


async def test_a_cluster_that_lost_its_data_is_joined_again(claims: RedisClaims, redis: RedisConnection) -> None:
    await claims.join(A)
    await claims.claim(A.instance, [Q1])
    await redis.command("FLUSHDB")
    with pytest.raises(StateUnavailable, match="lost its data"):
        await claims.beat(A.instance, 0)
    with pytest.raises(NotAMember):
        await claims.beat(A.instance, 0)
    assert (await claims.join(A)).members == {A.instance: A}


async def test_a_call_that_is_cancelled_ends(claims: RedisClaims) -> None:
    """Whenever the cancellation comes: a client with timeouts of its sockets loses some."""
    chance = random.Random(1)

    async def beat_on() -> None:
        while True:
            await claims.beat(A.instance, 0)

    await claims.join(A)
    for _ in range(500):
        task = asyncio.create_task(beat_on())
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done
