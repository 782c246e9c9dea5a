"""Records in Redis that this popgate can't read, damaged or newer ones, do not keep others from being settled."""

import secrets
from collections.abc import AsyncGenerator

import msgspec
import pytest

from contract.lease_bench import FIRST, INVISIBILITY, QUEUE, SUBSCRIPTION, A, B, C
from contract.lease_group_bench import BUILDER, DAY, KEY, LEASE, STREAM
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.lease_groups import RedisLeaseGroups
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.domain.lease import SettleAction, SettleStatus
from popgate.domain.names import CopyId, LeaseId, StreamName
from popgate.ports.lease_groups import Renewal
from popgate.ports.leases import GrantEntry, GrantRequest, GroupPart, SettleEntry
from support.redis import RedisServer

OTHER_STREAM = StreamName("other")
DAMAGED = b"junk"
NEWER = msgspec.msgpack.encode([99, LEASE, 0, 0, 1, 0, 0, 1])
"""A record in a state that this popgate does not know."""


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncGenerator[RedisConnection]:
    connection = RedisConnection(parse_address(redis_server.url()), secrets.token_hex(8))
    yield connection
    await connection.close()


@pytest.fixture
async def store(redis: RedisConnection) -> RedisLeaseStore:
    store = RedisLeaseStore(redis)
    await store.claim(QUEUE)
    return store


@pytest.fixture
def groups(redis: RedisConnection) -> RedisLeaseGroups:
    return RedisLeaseGroups(redis)


async def lease(store: RedisLeaseStore, lease_id: LeaseId, *copy_ids: CopyId, group: GroupPart | None = None) -> None:
    entries = [GrantEntry(QUEUE, 2**52, copy_id, 0) for copy_id in copy_ids]
    await store.grant(
        GrantRequest(
            subscription=SUBSCRIPTION,
            lease_id=lease_id,
            entries=entries,
            invisibility_seconds=INVISIBILITY,
            max_deliveries=None,
            mode_generation=1,
            group=group,
        )
    )


async def form(
    store: RedisLeaseStore, groups: RedisLeaseGroups, *copy_ids: CopyId, stream: StreamName = STREAM
) -> None:
    key = KEY._replace(stream=stream)
    await groups.begin(key, lease_id=LEASE, builder=BUILDER, slices=1)
    await lease(store, LEASE, *copy_ids, group=GroupPart(key, BUILDER))
    await groups.freeze(key, BUILDER)


async def spoil(redis: RedisConnection, key: str, field: str, record: bytes = DAMAGED) -> None:
    assert await redis.command("HSET", f"{redis.prefix}{key}", field, record) == 0, "it was there"


@pytest.mark.parametrize("record", [DAMAGED, NEWER], ids=["damaged", "newer"])
async def test_the_other_leases_of_a_batch_are_settled(
    redis: RedisConnection, store: RedisLeaseStore, record: bytes
) -> None:
    await lease(store, FIRST, A, B)
    await spoil(redis, f"live:{QUEUE}", A, record)
    answers = await store.settle([SettleEntry(QUEUE, copy_id, FIRST, SettleAction.ACK) for copy_id in (A, B)])
    assert [answer.status for answer in answers] == [SettleStatus.LOST, SettleStatus.DONE]
    assert answers[0].record is None


@pytest.mark.parametrize("record", [DAMAGED, NEWER], ids=["damaged", "newer"])
async def test_the_other_members_of_a_lease_group_are_renewed_and_settled(
    redis: RedisConnection, store: RedisLeaseStore, groups: RedisLeaseGroups, record: bytes
) -> None:
    await form(store, groups, A, B, C)
    await spoil(redis, f"live:{QUEUE}", A, record)
    ends_at = await groups.begin_renewal(KEY, seconds=2 * INVISIBILITY, age_seconds_max=DAY)
    step = await groups.renew(KEY, 0, Renewal(ends_at, regrant=True, max_deliveries=None, mode_generation=1))
    assert [member.record is not None for member in step.members] == [False, True, True]
    await spoil(redis, f"live:{QUEUE}", B, record)
    await groups.begin_ack(SUBSCRIPTION, STREAM, KEY.epoch)
    settled = await groups.settle_next(SUBSCRIPTION, STREAM)
    statuses = {member.copy_id: member.answer.status for member in settled.members}
    assert statuses == {B: SettleStatus.LOST, C: SettleStatus.DONE}
    assert (settled.lost, settled.more) == (2, False)


async def test_the_other_lease_groups_and_streams_are_settled(
    redis: RedisConnection, store: RedisLeaseStore, groups: RedisLeaseGroups
) -> None:
    await form(store, groups, A)
    await form(store, groups, B, stream=OTHER_STREAM)
    await form(store, groups, C, stream=StreamName("third"))
    for stream in (STREAM, OTHER_STREAM):
        await groups.begin_ack(SUBSCRIPTION, stream, KEY.epoch)
    (epoch_of_third,) = (
        name.decode() for name in await redis.command("HKEYS", f"{redis.prefix}groups:t/g") if name[:5] == b"third"
    )
    await spoil(redis, "groups:t/g", epoch_of_third)
    await spoil(redis, "streams:t/g", OTHER_STREAM)
    await groups.collect(forming_seconds=DAY, older_than_seconds=DAY)
    assert await groups.half_settled(SUBSCRIPTION) == [STREAM]
    assert [one.stream for one in await groups.groups(SUBSCRIPTION)] == [OTHER_STREAM], "it counts as not acked"
    settled = await groups.settle_next(SUBSCRIPTION, STREAM)
    assert [member.copy_id for member in settled.members] == [A]
