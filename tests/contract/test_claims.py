"""The claims of a cluster, on a real Redis."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from popgate.adapters.redis import change_signals
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.change_signals import ChangeSignal
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.domain.errors import NotAMember, StateUnavailable
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import Member
from popgate.runtime.background import Background
from simulator.direct import SIMULATED_PLACE, memory_connection
from simulator.redis_memory import MemoryRedis
from support.redis import RedisServer

GONE_SECONDS = 0.3
A, B = (Member(InstanceId(name), f"http://{name}:8080", (1, 2)) for name in "ab")
Q1, Q2, Q3 = (BrokerQueue(f"q{number}") for number in (1, 2, 3))


@pytest.fixture
def listeners() -> dict[bytes, ChangeSignal]:
    """Subscribers to the simulation's Redis, by channel."""
    return {}


@pytest.fixture(params=["redis", "simulated"])
async def redis(request: pytest.FixtureRequest, listeners: dict[bytes, ChangeSignal]) -> AsyncIterator[RedisConnection]:
    if request.param == "simulated":

        def tell(channel: bytes, message: bytes) -> None:
            if channel in listeners:
                listeners[channel].notify()

        yield memory_connection(MemoryRedis(time.time, tell))
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    redis = RedisConnection(parse_address(server.url()), secrets.token_hex(4))
    yield redis
    await redis.close()


@pytest.fixture
async def claims(redis: RedisConnection, listeners: dict[bytes, ChangeSignal]) -> AsyncIterator[RedisClaims]:
    claims = RedisClaims(redis, gone_seconds=GONE_SECONDS)
    if redis.place == SIMULATED_PLACE:
        listeners[f"{redis.prefix}{claims.signal.channel}".encode()] = claims.signal
        claims.signal.notify()  # a new subscriber may have missed something
        yield claims
        return
    background = Background()
    background.spawn(claims.listen(), name="hear")
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
    """As after an outage of Redis: the first proxy that returns is not the only one alive."""
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


async def test_who_speaks_no_version_of_a_members_is_kept_out_and_changes_nothing(claims: RedisClaims) -> None:
    await claims.join(A)
    before = await claims.join(Member(B.instance, B.address, (2, 3)))
    for protocols in ((1, 1), (3, 4), (4, 4), (0, 0)):  # (1, 2) and (2, 3) are in
        stranger = Member(InstanceId("stranger"), "http://stranger:8080", protocols)
        assert await claims.join(stranger, [Q1]) == before
        with pytest.raises(NotAMember):
            await claims.claim(stranger.instance, [Q1])
    await claims.remove(stranger.instance)
    assert await claims.beat(A.instance, before.version) is None
    assert (await claims.join(stranger._replace(protocols=(2, 2)))).members.keys() >= {stranger.instance}


async def test_who_is_kept_out_gets_in_once_those_in_the_way_are_surely_gone(claims: RedisClaims) -> None:
    """Their heartbeats have been missing for long: after an outage of Redis, that alone proves nothing."""
    await claims.join(A)
    await asyncio.sleep(GONE_SECONDS * 1.5)
    stranger = Member(InstanceId("stranger"), "http://stranger:8080", (3, 3))
    began = monotonic()
    async with asyncio.timeout(5):
        while stranger.instance not in (view := await claims.join(stranger)).members:  # noqa: ASYNC110  # it is to ask
            await asyncio.sleep(GONE_SECONDS / 5)
    assert view.members.keys() == {stranger.instance}
    assert monotonic() - began >= GONE_SECONDS


async def test_changes_are_heard(claims: RedisClaims) -> None:
    async with asyncio.timeout(5):
        await claims.changed()  # before it subscribed
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


@pytest.mark.parametrize("redis", ["redis"], indirect=True)
async def test_changes_are_heard_after_the_loss_of_a_connection_that_nobody_closed(
    redis: RedisConnection, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_signals, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(change_signals, "ANSWER_SECONDS", 0.2)
    async with relay_to(redis_server) as (url, swallow):
        listener = RedisConnection(parse_address(url), redis.prefix.split(":")[1])
        claims, background = RedisClaims(listener), Background()
        background.spawn(claims.listen(), name="hear")
        others = RedisClaims(redis)
        async with asyncio.timeout(10):
            await claims.changed()  # it is subscribed
            await asyncio.sleep(1.0)  # it has asked more than once, and was answered
            await others.join(A)
            await claims.changed()
            swallow()
            await others.join(B)
            await claims.changed()
        await background.stop()
        await listener.close()


@asynccontextmanager
async def relay_to(server: RedisServer) -> AsyncGenerator[tuple[str, Callable[[], None]]]:
    """Return a URL that leads to `server`, and a function after which its connections lead nowhere but stay open."""
    dead: list[asyncio.Event] = []

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_dead: asyncio.Event) -> None:
        while data := await source.read(65_536):
            if not is_dead.is_set():
                sink.write(data)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)
        dead.append(asyncio.Event())
        ways = (carry(reader, far_writer, dead[-1]), carry(far_reader, writer, dead[-1]))
        await asyncio.gather(*ways, return_exceptions=True)

    def swallow() -> None:
        for one in dead:
            one.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as relay:
        yield f"redis://127.0.0.1:{relay.sockets[0].getsockname()[1]}/0", swallow


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
    """At any moment of the cancellation: a client with socket timeouts loses some cancellations."""
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


# ---------------------------------------------------------------- entries of another program


DAMAGED = {
    "no-json": "not json",
    "number": "5",
    "short": '["https://x:1"]',
    "no-address": "[5,[1,2],true]",
    "no-versions": '["https://x:1",["a","b"],true]',
    "no-range": '["https://x:1",[1],true]',
    "far": '["https://x:1",[1,99999999999999999999999],true]',
    "long": '["https://' + "x" * 1_000 + '",[1,2],true]',
    "deep": "[" * 5_000 + "]" * 5_000,
    "no name": '["https://x:1",[1,2],true]',
}


async def test_members_that_can_not_be_read_are_left_out_and_logged_once(
    claims: RedisClaims, redis: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    await claims.join(A)
    for name, says in DAMAGED.items():
        await redis.command("HSET", f"{redis.prefix}members", name, says)
    await redis.command("HSET", f"{redis.prefix}members", b"\xff", b"\xff")
    for _ in range(3):
        view = await claims.beat(A.instance, -1)
        assert view is not None
        assert view.members == {A.instance: A}
    assert (await claims.join(B)).members == {A.instance: A, B.instance: B}
    entries = [vars(record)["entry"] for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(entries) == sorted(["a name", *(f"member {name}" for name in DAMAGED)])


async def test_a_member_whose_own_entry_was_damaged_joins_again(claims: RedisClaims, redis: RedisConnection) -> None:
    await claims.join(A)
    await redis.command("HSET", f"{redis.prefix}members", A.instance, "not json")
    with pytest.raises(NotAMember):
        await claims.beat(A.instance, -1)
    assert (await claims.join(A)).members == {A.instance: A}


@pytest.mark.parametrize("beat", ["future", "infinite", "missing"])
async def test_a_member_without_a_heartbeat_of_its_own_is_soon_silent(
    claims: RedisClaims, redis: RedisConnection, beat: str
) -> None:
    view = await claims.join(A)
    await redis.command("HSET", f"{redis.prefix}members", "evil", '["https://127.0.0.1:1",[9,9],true]')
    await redis.command("HSET", f"{redis.prefix}owners", Q1, "evil")
    if beat != "missing":
        score = "inf" if beat == "infinite" else (time.time_ns() // 1_000) + 10**12
        await redis.command("ZADD", f"{redis.prefix}beats", score, "evil")
        await redis.command("SET", f"{redis.prefix}heard", (time.time_ns() // 1_000) + 10**12)
    assert B.instance not in (await claims.join(B)).members, "it may be alive"
    began = monotonic()
    async with asyncio.timeout(5):
        while B.instance not in view.members:
            await asyncio.sleep(GONE_SECONDS / 5)
            await claims.beat(A.instance, 0)
            view = await claims.join(B)
    assert monotonic() - began < 3 * GONE_SECONDS
    assert view.members == {A.instance: A, B.instance: B}
    assert view.owners == {}
