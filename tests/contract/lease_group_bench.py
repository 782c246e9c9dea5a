"""Helpers for the tests of lease groups on a bench (``lease_bench``)."""

from collections.abc import Sequence

from contract.lease_bench import INVISIBILITY, SUBSCRIPTION, Bench, grant, statuses
from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import CopyId, LeaseId, StreamName
from popgate.ports.lease_groups import Renewal, RenewedMember, StoredGroup
from popgate.ports.leases import GroupPart

STREAM = StreamName("s")
KEY = GroupKey(SUBSCRIPTION, STREAM, 1)
LEASE = LeaseId("lease of the group")
BUILDER = "the first PUT"
DAY = 86_400.0
AGE_MAX = DAY / 2


async def begin(bench: Bench, key: GroupKey = KEY, *, builder: str = BUILDER, lease: LeaseId = LEASE) -> StoredGroup:
    return await bench.groups.begin(key, lease_id=lease, builder=builder, slices=4)


async def add(
    bench: Bench, *copy_ids: CopyId, key: GroupKey = KEY, builder: str = BUILDER, lease: LeaseId = LEASE
) -> list[GrantStatus]:
    return statuses(await grant(bench, lease, *copy_ids, group=GroupPart(key, builder)))


async def frozen(bench: Bench, *copy_ids: CopyId, key: GroupKey = KEY, lease: LeaseId = LEASE) -> StoredGroup:
    await begin(bench, key, lease=lease)
    await add(bench, *copy_ids, key=key, lease=lease)
    group = await bench.groups.freeze(key, BUILDER)
    assert group is not None
    return group


async def renew(
    bench: Bench,
    key: GroupKey = KEY,
    *,
    seconds: float = INVISIBILITY,
    regrant: bool = True,
    max_deliveries: int | None = None,
    generation: int = 1,
) -> Sequence[RenewedMember]:
    ends_at = await bench.groups.begin_renewal(key, seconds=seconds, age_seconds_max=AGE_MAX)
    renewal = Renewal(ends_at, regrant=regrant, max_deliveries=max_deliveries, mode_generation=generation)
    renewed: list[RenewedMember] = []
    place: int | None = 0
    while place is not None:
        step = await bench.groups.renew(key, place, renewal)
        renewed += step.members
        place = step.next_position
    return renewed


async def settle_all(bench: Bench) -> tuple[list[tuple[CopyId, SettleAction, SettleStatus]], int]:
    """Settle a whole group; return what was settled, in order, and how many messages were lost."""
    settled: list[tuple[CopyId, SettleAction, SettleStatus]] = []
    lost, more = 0, True
    while more:
        step = await bench.groups.settle_next(SUBSCRIPTION, STREAM)
        settled += [(member.copy_id, step.action, member.answer.status) for member in step.members]
        lost += step.lost
        more = step.more
    return settled, lost


async def copies(bench: Bench, key: GroupKey = KEY) -> list[CopyId]:
    return [member.copy_id for member in await bench.groups.members(key, 0, 1 << 40)]


async def found(bench: Bench, key: GroupKey = KEY) -> StoredGroup:
    group = await bench.groups.find(key)
    assert group is not None
    return group
