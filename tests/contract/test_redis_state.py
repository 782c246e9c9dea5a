"""Special cases of the state in Redis: lost connections, restarts, refusals, lost data, and warnings."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import SupportsIndex, overload

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from contract.lease_bench import FIRST, QUEUE, SECOND, SUBSCRIPTION, A, B
from popgate.adapters.redis import connection as connection_module
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.catalog import RedisCatalog
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.leases import RECORDS_PER_STEP, RedisLeaseStore
from popgate.adapters.redis.limits import RedisLimits
from popgate.adapters.redis.lock_store import RedisLockStore
from popgate.adapters.redis.startup import left_secret_warnings, startup_warnings
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
from popgate.domain.locks import LockDefinition, LockKind
from popgate.domain.names import BrokerQueue, CopyId, GroupName, InstanceId, LeaseId, Subscription, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec
from popgate.ports.leases import GrantEntry, GrantRequest, LoadedRecord, SettleEntry
from popgate.ports.limits import Limit, Vacancy
from support.redis import RedisServer

HIGHEST = 2**52
REFUSED_KEPT_SECONDS = 0.6
"""Seconds; a little longer than a refused waiter is remembered."""
COPIES = [CopyId(f"{number:032x}") for number in range(1_000)]


@pytest.fixture(scope="module")
def server(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that may be stopped and reconfigured. Depends on the shared one, which handles a missing installation."""
    with RedisServer(tmp_path_factory.mktemp("fragile-redis")) as server:
        yield server


@pytest.fixture
async def admin(server: RedisServer) -> AsyncGenerator[RedisConnection]:
    server.start()
    admin = RedisConnection(parse_address(server.url()))
    await admin.command("CONFIG", "SET", "appendfsync", "always")  # acknowledged writes survive a crash
    await admin.command("FLUSHALL")
    yield admin
    await admin.close()


@pytest.fixture
async def connection(server: RedisServer, admin: RedisConnection) -> AsyncGenerator[RedisConnection]:
    connection = RedisConnection(parse_address(server.url()))
    yield connection
    await connection.close()


@pytest.fixture
def store(connection: RedisConnection) -> RedisLeaseStore:
    return RedisLeaseStore(connection)


def grant_request(lease_id: LeaseId, *copy_ids: CopyId, epoch: int = HIGHEST, seconds: float = 30.0) -> GrantRequest:
    return GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=lease_id,
        entries=[GrantEntry(QUEUE, epoch, copy_id, 0) for copy_id in copy_ids],
        invisibility_seconds=seconds,
        max_deliveries=None,
        mode_generation=1,
    )


async def grant(
    store: RedisLeaseStore, lease_id: LeaseId, *copy_ids: CopyId, epoch: int = HIGHEST, seconds: float = 30.0
) -> list[GrantStatus]:
    request = grant_request(lease_id, *copy_ids, epoch=epoch, seconds=seconds)
    return [answer.status for answer in await store.grant(request)]


async def ack(store: RedisLeaseStore, lease_id: LeaseId, copy_ids: Sequence[CopyId]) -> list[SettleStatus]:
    entries = [SettleEntry(QUEUE, copy_id, lease_id, SettleAction.ACK) for copy_id in copy_ids]
    return [answer.status for answer in await store.settle(entries)]


async def test_of_two_proxies_one_gets_the_lease(server: RedisServer, store: RedisLeaseStore) -> None:
    connection = RedisConnection(parse_address(server.url()))
    other = RedisLeaseStore(connection)
    try:
        for number in range(20):
            copies = COPIES[number * 20 : number * 20 + 20]
            mine, theirs = await asyncio.gather(grant(store, FIRST, *copies), grant(other, SECOND, *reversed(copies)))
            assert {*mine} | {*theirs} == {GrantStatus.GRANTED, GrantStatus.HELD}
            assert mine.count(GrantStatus.GRANTED) + theirs.count(GrantStatus.GRANTED) == 20
    finally:
        await connection.close()


async def test_a_restart_keeps_what_was_answered_and_service_goes_on(
    server: RedisServer, store: RedisLeaseStore
) -> None:
    epoch = await store.claim(QUEUE)
    assert await grant(store, FIRST, A, B) == [GrantStatus.GRANTED] * 2
    assert await ack(store, FIRST, [B]) == [SettleStatus.DONE]
    server.kill()
    with pytest.raises(StateUnavailable, match="can't be reached") as caught:
        await grant(store, SECOND, A)
    assert caught.value.retry_after_seconds > 0
    assert "can't be reached" in (store.unavailable_reason() or "")
    server.start()
    # Its scripts are gone with it, and the connections: neither is noticed.
    assert await grant(store, SECOND, A, B, epoch=epoch) == [GrantStatus.HELD, GrantStatus.SETTLED]
    assert store.unavailable_reason() is None
    assert await ack(store, FIRST, [A]) == [SettleStatus.DONE]
    assert await store.claim(QUEUE) > epoch


async def test_a_power_cut_of_redis_keeps_what_was_answered(
    server: RedisServer, admin: RedisConnection, store: RedisLeaseStore
) -> None:
    """A half-written command follows: Redis truncates it by itself."""
    for number in range(3):
        await grant(store, LeaseId(f"lease {number}"), COPIES[number], epoch=HIGHEST)
        await ack(store, LeaseId(f"lease {number}"), [COPIES[number]])
        await asyncio.to_thread(server.cut_power)
        await asyncio.to_thread(server.start)
        await admin.command("CONFIG", "SET", "appendfsync", "always")  # the restart has forgotten it
        copies, leases = COPIES[: number + 1], [LeaseId(f"lease {one}") for one in range(number + 1)]
        for copy, lease in zip(copies, leases, strict=True):
            assert await ack(store, lease, [copy]) == [SettleStatus.ALREADY]


async def test_a_watch_knows_what_is_wrong_while_nobody_calls(
    server: RedisServer, store: RedisLeaseStore, connection: RedisConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "WATCH_SECONDS", 0.05)
    watch = asyncio.create_task(connection.watch())
    try:
        server.kill()
        await eventually(lambda: store.unavailable_reason() is not None)
        server.start()
        await eventually(lambda: store.unavailable_reason() is None)
    finally:
        watch.cancel()


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it did not come about")


async def test_connections_that_were_cut_are_made_anew(admin: RedisConnection, store: RedisLeaseStore) -> None:
    await asyncio.gather(*(grant(store, FIRST, copy_id) for copy_id in COPIES[:20]))
    await admin.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.05)  # until the sockets have noticed
    statuses = await asyncio.gather(*(grant(store, SECOND, copy_id) for copy_id in COPIES[:20]))
    assert statuses == [[GrantStatus.HELD]] * 20


async def test_a_connection_that_is_lost_in_a_call_is_told(
    server: RedisServer, admin: RedisConnection, store: RedisLeaseStore
) -> None:
    assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
    server.pause()
    call = asyncio.create_task(grant(store, SECOND, A))
    await asyncio.sleep(0.05)  # until it is sent
    server.kill()
    with pytest.raises(StateUnavailable):
        await call
    server.start()
    assert await grant(store, SECOND, A) == [GrantStatus.HELD]


async def test_a_redis_that_hangs_is_given_up_in_time(server: RedisServer, store: RedisLeaseStore) -> None:
    assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
    server.pause()
    try:
        async with asyncio.timeout(4.0):
            calls = [grant(store, SECOND, copy_id) for copy_id in COPIES[:40]]  # more than there are connections
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        server.resume()
    assert {type(outcome) for outcome in outcomes} == {StateUnavailable}
    assert await grant(store, SECOND, A) == [GrantStatus.HELD]


async def test_each_of_many_calls_gets_its_own_answer_also_when_others_are_given_up(
    connection: RedisConnection,
) -> None:
    await connection.command("PING")
    calls = [asyncio.create_task(connection.command("ECHO", number)) for number in range(300)]
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    late = [asyncio.create_task(connection.command("ECHO", number)) for number in range(300, 400)]
    await asyncio.sleep(0)
    late[7].cancel()
    with pytest.raises(StateUnavailable):
        await connection.command("EVAL", "return redis.error_reply('OOM no memory left')", 0)
    outcomes = await asyncio.gather(*calls, *late, return_exceptions=True)
    for number, outcome in enumerate(outcomes):
        if (number < 300 and number % 3 == 0) or number == 307:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            assert outcome == str(number).encode()


async def test_a_connection_that_was_closed_stays_closed(server: RedisServer) -> None:
    connection = RedisConnection(parse_address(server.url()))
    calls = [asyncio.create_task(connection.command("ECHO", number)) for number in range(3)]
    await asyncio.sleep(0)
    for _ in range(2):
        await connection.close()
    outcomes = await asyncio.gather(*calls, connection.command("PING"), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StateUnavailable}


async def test_scripts_that_redis_has_forgotten_are_sent_again(admin: RedisConnection, store: RedisLeaseStore) -> None:
    assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
    await admin.command("SCRIPT", "FLUSH")
    assert await grant(store, SECOND, A) == [GrantStatus.HELD]


async def test_a_full_redis_gives_no_lease_and_takes_settlements(
    admin: RedisConnection, store: RedisLeaseStore
) -> None:
    assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
    await admin.command("CONFIG", "SET", "maxmemory", "1mb")
    try:
        with pytest.raises(StateUnavailable, match="raise maxmemory"):
            await grant(store, SECOND, B)
        assert await ack(store, FIRST, [A]) == [SettleStatus.DONE]
    finally:
        await admin.command("CONFIG", "SET", "maxmemory", "0")
    assert await grant(store, SECOND, A, B) == [GrantStatus.SETTLED, GrantStatus.GRANTED]


async def test_a_full_redis_gives_no_lease_within_a_limit_either(
    admin: RedisConnection, connection: RedisConnection, store: RedisLeaseStore
) -> None:
    """Even if old entries have to be removed first."""
    limits = RedisLimits(connection)
    limit = Limit(SUBSCRIPTION, [QUEUE], 3, InstanceId("a"))
    epoch = await store.claim(QUEUE)
    request = grant_request(FIRST, A, epoch=epoch, seconds=0.001)
    assert (await limits.grant(request, limit))[1] == Vacancy(2, is_full=False)
    await limits.vacancy(limit._replace(in_flight_max=0, member=InstanceId("b")), waits=True)
    await asyncio.sleep(REFUSED_KEPT_SECONDS)
    await admin.command("CONFIG", "SET", "maxmemory", "1mb")
    try:
        with pytest.raises(StateUnavailable, match="raise maxmemory"):
            await limits.grant(grant_request(SECOND, B, epoch=epoch), limit)
    finally:
        await admin.command("CONFIG", "SET", "maxmemory", "0")
    assert [one.copy_id for one in await store.load(QUEUE)] == [A]


async def test_a_replica_takes_nothing(server: RedisServer, admin: RedisConnection, store: RedisLeaseStore) -> None:
    assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
    await admin.command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StateUnavailable, match="replica"):
            await ack(store, FIRST, [A])
    finally:
        await admin.command("REPLICAOF", "NO", "ONE")
    assert await ack(store, FIRST, [A]) == [SettleStatus.DONE]


async def test_lost_data_is_noticed_before_anything_is_given(
    admin: RedisConnection, connection: RedisConnection, store: RedisLeaseStore
) -> None:
    told: list[str] = []
    connection.on_data_loss(lambda: told.append("lost"))
    epochs = [await store.claim(QUEUE)]
    await grant(store, FIRST, A)
    await admin.command("FLUSHALL")
    outcomes = await asyncio.gather(*(grant(store, SECOND, A) for _ in range(4)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StateUnavailable}
    assert told == ["lost"]
    epochs.append(await store.claim(QUEUE))
    assert epochs == sorted({*epochs}), "epochs grow over it"
    assert await grant(store, SECOND, A, epoch=epochs[1]) == [GrantStatus.GRANTED]
    assert told == ["lost"]


async def test_all_who_share_a_namespace_share_a_name_also_with_who_comes_after_a_loss_of_data(
    server: RedisServer, admin: RedisConnection, connection: RedisConnection, store: RedisLeaseStore
) -> None:
    cluster = await connection.cluster()
    assert await connection.cluster() == await admin.cluster() == cluster
    another = RedisConnection(parse_address(server.url()), namespace="another")
    late = RedisConnection(parse_address(server.url()))
    try:
        await store.claim(QUEUE)
        await admin.command("FLUSHALL")
        with pytest.raises(StateUnavailable, match="lost its data"):
            await store.claim(QUEUE)
        await store.claim(QUEUE)
        assert await late.cluster() == cluster != await another.cluster()
    finally:
        await another.close()
        await late.close()


async def test_a_secret_that_an_earlier_popgate_left_in_redis_is_told_with_its_key_and_never_shown(
    admin: RedisConnection, connection: RedisConnection
) -> None:
    assert await left_secret_warnings(connection, [b"another"]) == []
    await admin.command("SET", "popgate:default:secret", "hunter2")
    (known,) = await left_secret_warnings(connection, [b"another", b"hunter2"])
    assert "delete the key popgate:default:secret" in known
    (unknown,) = await left_secret_warnings(connection, [b"another"])
    assert "in the key popgate:default:secret: if messages" in unknown
    assert "--secret-file" in unknown
    assert "hunter2" not in known + unknown


async def test_deployments_with_names_of_their_own_share_a_redis(server: RedisServer, store: RedisLeaseStore) -> None:
    connection = RedisConnection(parse_address(server.url()), namespace="another")
    try:
        assert await grant(store, FIRST, A) == [GrantStatus.GRANTED]
        assert await grant(RedisLeaseStore(connection), SECOND, A) == [GrantStatus.GRANTED]
    finally:
        await connection.close()


async def test_nothing_is_left_of_what_was_trimmed(admin: RedisConnection, store: RedisLeaseStore) -> None:
    await store.claim(QUEUE)
    before = {*await admin.command("KEYS", "*")}
    for start in range(0, len(COPIES), 100):
        copies = COPIES[start : start + 100]
        await grant(store, FIRST, *copies)
        await ack(store, FIRST, copies)
    assert await store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=-1.0) == len(COPIES)
    assert {*await admin.command("KEYS", "*")} == before


async def test_collecting_leaves_nothing_behind_either(admin: RedisConnection, store: RedisLeaseStore) -> None:
    await store.claim(QUEUE)
    before = {*await admin.command("KEYS", "*")}
    await grant(store, FIRST, *COPIES[:10], seconds=0.001)
    await ack(store, FIRST, COPIES[:5])
    assert await store.collect(older_than_seconds=-1.0) == 10
    assert {*await admin.command("KEYS", "*")} == before


async def test_a_record_that_can_not_be_read_keeps_no_other_queue_from_being_collected(
    admin: RedisConnection, store: RedisLeaseStore
) -> None:
    queues = BrokerQueue("a"), BrokerQueue("z")
    for queue in (queues[0], QUEUE, queues[1]):
        await store.claim(queue)
    await grant(store, FIRST, *COPIES[:10], seconds=0.001)
    (live,) = await admin.command("KEYS", f"*:live:{QUEUE}")
    for queue in queues:
        await admin.command("HSET", live.replace(QUEUE.encode(), queue.encode()), "copy", "junk")
    with pytest.raises(ResponseError):
        await store.collect(older_than_seconds=-1.0)
    assert await admin.command("EXISTS", live) == 0


async def test_the_record_of_an_attempt_is_looked_at_long_before_a_long_lease_ends(
    admin: RedisConnection, store: RedisLeaseStore
) -> None:
    await store.claim(QUEUE)
    await store.grant(replace(grant_request(FIRST, COPIES[0], seconds=43_200.0), attempt_id="try"))
    ((key,),) = [await admin.command("KEYS", "*:attempt_ends")]
    (seconds, _) = await admin.command("TIME")
    assert await admin.command("ZCOUNT", key, "-inf", (int(seconds) + 1_000) * 1_000_000) == 1


async def test_settings_that_put_records_at_risk_are_warned_of(
    admin: RedisConnection, connection: RedisConnection
) -> None:
    assert await startup_warnings(connection) == []
    await admin.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    await admin.command("CONFIG", "SET", "appendonly", "no")
    try:
        append_only, eviction = await startup_warnings(connection)
    finally:
        await admin.command("CONFIG", "SET", "appendonly", "yes")
        await admin.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "set appendonly yes" in append_only
    assert "maxmemory-policy allkeys-lru" in eviction
    for sync in ("everysec", "no"):
        await admin.command("CONFIG", "SET", "appendfsync", sync)
        (warning,) = await startup_warnings(connection)
        assert f"(appendfsync {sync})" in warning
        assert "set appendfsync always" in warning


async def test_settings_that_may_not_be_seen_are_said_to_be_unseen(server: RedisServer, admin: RedisConnection) -> None:
    await admin.command("ACL", "SETUSER", "limited", "on", ">secret", "~popgate:*", "+@all", "-config")
    connection = RedisConnection(parse_address(server.url().replace("redis://", "redis://limited:secret@")))
    try:
        (warning,) = await startup_warnings(connection)
        assert "CONFIG GET" in warning
        assert connection.failure() is None
        assert await grant(RedisLeaseStore(connection), FIRST, A) == [GrantStatus.GRANTED]
        await admin.command("ACL", "SETUSER", "limited", "-evalsha", "-eval")
        with pytest.raises(StateUnavailable, match="does not permit"):
            await grant(RedisLeaseStore(connection), FIRST, A)
    finally:
        await connection.close()
        await admin.command("ACL", "DELUSER", "limited")


async def test_what_is_missing_after_a_loss_is_not_lost_until_the_owner_has_written_back_what_he_knows(
    admin: RedisConnection, store: RedisLeaseStore
) -> None:
    epoch = await store.claim(QUEUE)
    await grant(store, FIRST, *COPIES, epoch=epoch)
    remembered = await store.load(QUEUE)
    await admin.command("FLUSHALL")
    for _ in range(2):
        with pytest.raises(StateUnavailable, match="lost its data"):
            await ack(store, FIRST, [COPIES[0]])
    with pytest.raises(StateUnavailable, match="yet to write them back"):
        await ack(store, FIRST, [COPIES[0]])
    again = await store.restore(QUEUE, remembered, above=epoch)
    assert again > epoch
    assert set(await ack(store, FIRST, COPIES[:500])) == {SettleStatus.DONE}
    assert set(await grant(store, SECOND, *COPIES[500:], epoch=again)) == {GrantStatus.HELD}
    assert await grant(store, SECOND, A, epoch=epoch) == [GrantStatus.FENCED]
    (lost,) = await ack(store, FIRST, [A])
    assert lost is SettleStatus.LOST


async def test_epochs_grow_over_a_loss_also_where_the_clock_went_back(
    admin: RedisConnection, store: RedisLeaseStore
) -> None:
    await store.claim(QUEUE)
    await admin.command("FLUSHALL")
    with pytest.raises(StateUnavailable):
        await store.claim(QUEUE)
    assert await store.restore(QUEUE, [], above=HIGHEST) == HIGHEST + 1


class LostAfterTheFirstPart(list[LoadedRecord]):
    """Redis loses its data when the second part is requested."""

    def __init__(self, records: Sequence[LoadedRecord], port: int) -> None:
        super().__init__(records)
        self._port = port

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> LoadedRecord: ...
    @overload
    def __getitem__(self, place: slice, /) -> list[LoadedRecord]: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> LoadedRecord | list[LoadedRecord]:
        if isinstance(place, slice) and place.start:
            with Redis(port=self._port) as client:
                client.flushall()  # pyright: ignore[reportUnknownMemberType] - redis-py says little of it
        return super().__getitem__(place)


async def test_records_that_are_written_back_all_stand_in_the_same_data(
    server: RedisServer, admin: RedisConnection, store: RedisLeaseStore
) -> None:
    """Redis loses its data once more between two parts: otherwise the owner would have claimed data that it has not
    restored.
    """
    copies = [CopyId(f"{number:032x}") for number in range(2_500)]
    epoch = await store.claim(QUEUE)
    await grant(store, FIRST, *copies, epoch=epoch)
    remembered = await store.load(QUEUE)
    await admin.command("FLUSHALL")
    with pytest.raises(StateUnavailable):
        await store.claim(QUEUE)
    assert len(remembered) > RECORDS_PER_STEP, "they are more than one part"
    with pytest.raises(StateUnavailable, match="lost its data"):
        await store.restore(QUEUE, LostAfterTheFirstPart(remembered, server.port), above=epoch)
    assert not await admin.command("EXISTS", f"{admin.prefix}claims")
    assert await store.restore(QUEUE, remembered, above=epoch) > epoch
    assert set(await ack(store, FIRST, copies)) == {SettleStatus.DONE}


async def test_topics_groups_and_locks_are_put_back_with_the_first_call_after_a_loss(
    server: RedisServer, admin: RedisConnection, connection: RedisConnection
) -> None:
    catalog, locks = RedisCatalog(connection), RedisLockStore(connection)
    topic, gone = (TopicSpec(topic=TopicName(name), queue_count=3) for name in ("kept", "gone"))
    group = GroupSpec(subscription=Subscription(topic.topic, GroupName("g")))
    lock = LockDefinition(name="bills", kind=LockKind.SEMAPHORE, slots=3)
    for spec in (topic, gone):
        await catalog.put_topic(spec)
    assert await catalog.change_group(None, group)
    await catalog.delete_topic(gone.topic)
    await locks.put(lock)
    await locks.put(replace(lock, name="dropped"))
    await locks.delete("dropped")
    await connection.bind_broker("mark")
    await connection.bound_broker()
    version = await catalog.version()
    reader_connection = RedisConnection(parse_address(server.url()))
    reader = RedisCatalog(reader_connection)
    try:
        assert await reader.topics() == [topic]
        assert await reader.groups() == [group]
        await admin.command("FLUSHALL")
        with pytest.raises(StateUnavailable, match="lost its data"):
            await reader.topics()
        assert await reader.topics() == [topic], "who has read it knows it"
        assert await reader.groups() == [group]
        assert await catalog.version() > version, "the others look"
        with pytest.raises(StateUnavailable, match="lost its data"):
            await locks.definitions()
        assert await locks.definitions() == [lock]
        assert await reader_connection.bound_broker() == "mark"
    finally:
        await reader_connection.close()


async def test_a_watch_notices_that_data_were_lost(
    admin: RedisConnection, connection: RedisConnection, store: RedisLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "WATCH_SECONDS", 0.05)
    told: list[str] = []
    connection.on_data_loss(lambda: told.append("lost"))
    await store.claim(QUEUE)
    watch = asyncio.create_task(connection.watch())
    try:
        await asyncio.sleep(0.2)
        assert not told
        await admin.command("FLUSHALL")
        await eventually(lambda: bool(told))
        await store.claim(QUEUE)
        await asyncio.sleep(0.2)
        assert told == ["lost"]
    finally:
        watch.cancel()
