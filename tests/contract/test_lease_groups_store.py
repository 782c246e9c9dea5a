"""The contract of the lease groups' half of the state port, over every adapter."""

import asyncio
from collections.abc import Sequence

import pytest

from contract.lease_bench import (
    INVISIBILITY,
    OTHER_QUEUE,
    QUEUE,
    SECOND,
    SUBSCRIPTION,
    THIRD,
    A,
    B,
    Bench,
    C,
    bench,
    grant,
    settle,
    statuses,
)
from popgate.domain.errors import Conflict, LeaseGroupAcked, LeaseGroupNotFound
from popgate.domain.lease import GrantStatus, RecordState, SettleAction, SettleStatus
from popgate.domain.lease_group import GROUPS_MAX, GroupKey, GroupState
from popgate.domain.names import CopyId, GroupName, LeaseId, StreamName, Subscription
from popgate.ports.lease_groups import BITE, Renewal, RenewedMember, StoredGroup
from popgate.ports.leases import GroupPart

__all__ = ["bench"]

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
        bite = await bench.groups.renew(key, place, renewal)
        renewed += bite.members
        place = bite.next_position
    return renewed


async def settle_all(bench: Bench) -> tuple[list[tuple[CopyId, SettleAction, SettleStatus]], int]:
    """What was settled, in order, and how many were lost."""
    settled: list[tuple[CopyId, SettleAction, SettleStatus]] = []
    lost, more = 0, True
    while more:
        bite = await bench.groups.settle_next(SUBSCRIPTION, STREAM)
        settled += [(member.copy_id, bite.action, member.answer.status) for member in bite.members]
        lost += bite.lost
        more = bite.more
    return settled, lost


async def copies(bench: Bench, key: GroupKey = KEY) -> list[CopyId]:
    return [member.copy_id for member in await bench.groups.members(key, 0, 1 << 40)]


async def found(bench: Bench, key: GroupKey = KEY) -> StoredGroup:
    group = await bench.groups.find(key)
    assert group is not None
    return group


# ---------------------------------------------------------------- forming


async def test_what_is_granted_for_a_group_is_its_membership_in_that_order(bench: Bench) -> None:
    assert (await begin(bench)).state is GroupState.FORMING
    assert await add(bench, C, A) == [GrantStatus.GRANTED] * 2
    assert await add(bench, A, B) == [GrantStatus.HELD, GrantStatus.GRANTED]
    group = await bench.groups.freeze(KEY, BUILDER)
    assert group is not None
    assert (group.state, group.message_count, group.lost, group.slices, group.span) == (GroupState.FROZEN, 3, 0, 4, 3)
    assert group.lease_id == LEASE
    assert group.remaining_seconds == pytest.approx(INVISIBILITY, abs=0.1)
    await bench.restart()
    members = await bench.groups.members(KEY, 0, 3)
    assert [(one.position, one.queue, one.copy_id, one.delivery_count) for one in members] == [
        (0, QUEUE, C, 1),
        (1, QUEUE, A, 1),
        (2, QUEUE, B, 1),
    ]
    assert await bench.groups.member_count(KEY, 1, 3) == 2
    assert [one.copy_id for one in await bench.groups.members(KEY, 1, 2)] == [A]


async def test_the_leases_end_with_the_first_that_was_given(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A)
    await bench.pass_time(10.0)
    await add(bench, B)
    assert (await found(bench)).remaining_seconds == pytest.approx(INVISIBILITY - 10.0, abs=0.1)


async def test_a_members_lease_is_a_lease_like_any_other(bench: Bench) -> None:
    await frozen(bench, A, B)
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.HELD]
    assert (await settle(bench, SettleAction.ACK, SECOND)).status is SettleStatus.LOST
    assert (await settle(bench, SettleAction.ACK, LEASE)).status is SettleStatus.DONE


async def test_a_repeated_put_goes_on_with_what_is_there_and_keeps_the_former_one_out(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A)
    again = await begin(bench, builder="the second PUT", lease=SECOND)
    assert (again.state, again.message_count, again.lease_id) == (GroupState.FORMING, 1, LEASE)
    with pytest.raises(Conflict):
        await add(bench, B)
    with pytest.raises(Conflict):
        await bench.groups.freeze(KEY, BUILDER)
    assert statuses(await grant(bench, THIRD, B)) == [GrantStatus.GRANTED]  # nothing was given with the refusal
    await add(bench, C, builder="the second PUT")
    assert await bench.groups.freeze(KEY, "the second PUT") is not None
    assert await copies(bench) == [A, C]
    with pytest.raises(Conflict):
        await add(bench, B, builder="the second PUT")  # frozen


async def test_a_group_without_members_is_gone_when_it_was_to_be_frozen(bench: Bench) -> None:
    await begin(bench)
    assert await bench.groups.freeze(KEY, BUILDER) is None
    assert await bench.groups.find(KEY) is None
    with pytest.raises(LeaseGroupNotFound):
        await copies(bench)


async def test_what_a_group_that_is_being_formed_loses_is_no_member(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A, B)
    await settle(bench, SettleAction.RELEASE, LEASE, A)
    assert [one.record is None for one in await renew(bench, regrant=False)] == [True, False]
    group = await bench.groups.freeze(KEY, BUILDER)
    assert group is not None
    assert (group.message_count, group.lost, group.span) == (1, 0, 2)


async def test_a_frozen_group_is_found_as_it_is(bench: Bench) -> None:
    await frozen(bench, A)
    again = await begin(bench, builder="another PUT", lease=SECOND)
    assert (again.state, again.message_count, again.lease_id) == (GroupState.FROZEN, 1, LEASE)


async def test_groups_are_named_by_subscription_stream_and_epoch(bench: Bench) -> None:
    other_stream = GroupKey(SUBSCRIPTION, StreamName("other"), 1)
    other_group = GroupKey(Subscription(SUBSCRIPTION.topic, GroupName("other")), STREAM, 1)
    await frozen(bench, A)
    await frozen(bench, B, key=other_stream, lease=SECOND)
    await frozen(bench, C, key=KEY._replace(epoch=2**63 - 1), lease=THIRD)
    assert await bench.groups.find(other_group) is None
    assert await copies(bench, other_stream) == [B]
    listed = await bench.groups.groups(SUBSCRIPTION)
    assert [(one.stream, one.epoch, one.message_count) for one in listed] == [
        ("other", 1, 1),
        ("s", 1, 1),
        ("s", 2**63 - 1, 1),
    ]
    assert [one.epoch for one in await bench.groups.groups(SUBSCRIPTION, StreamName("other"))] == [1]


async def test_there_are_only_so_many_groups(bench: Bench) -> None:
    await asyncio.gather(*(begin(bench, KEY._replace(epoch=epoch)) for epoch in range(GROUPS_MAX)))
    await begin(bench, KEY._replace(epoch=7))
    with pytest.raises(Conflict):
        await begin(bench, KEY._replace(epoch=GROUPS_MAX))


# ---------------------------------------------------------------- renewing


async def test_leases_that_ran_out_go_on_where_nobody_took_the_message(bench: Bench) -> None:
    await frozen(bench, A, B)
    await bench.pass_time(INVISIBILITY + 5)
    assert (await found(bench)).remaining_seconds == 0.0
    renewed = await renew(bench, seconds=60.0)
    assert [(one.copy_id, one.record and one.record.delivery_count) for one in renewed] == [(A, 1), (B, 1)]
    assert (await found(bench)).remaining_seconds == pytest.approx(60.0, abs=0.1)
    await bench.restart()
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.HELD]


async def test_what_went_elsewhere_is_lost_for_ever(bench: Bench) -> None:
    await frozen(bench, A, B, C)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A, B)
    await settle(bench, SettleAction.ACK, SECOND, A)
    assert [one.record is None for one in await renew(bench)] == [True, True, False]
    group = await found(bench)
    assert (group.message_count, group.lost, group.span) == (1, 2, 3)
    assert await copies(bench) == [C]
    await settle(bench, SettleAction.RELEASE, SECOND, B)
    assert [one.copy_id for one in await renew(bench)] == [C]
    assert statuses(await grant(bench, THIRD, B)) == [GrantStatus.GRANTED]


async def test_what_others_gave_back_is_leased_again_with_the_counts_it_was_read_with(bench: Bench) -> None:
    await frozen(bench, A)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A)
    await settle(bench, SettleAction.RELEASE, SECOND, A)
    (member,) = await renew(bench)
    assert member.record is not None
    assert (member.record.state, member.record.lease_id, member.record.delivery_count) == (RecordState.LEASED, LEASE, 3)
    (read,) = await bench.groups.members(KEY, 0, 1)
    assert read.delivery_count == 1


@pytest.mark.parametrize("why", ["no regrant", "exhausted", "an overtaken mode"])
async def test_an_extension_leases_nothing_anew(bench: Bench, why: str) -> None:
    await bench.store.allow_mode(SUBSCRIPTION, 2 if why == "an overtaken mode" else 1)
    await begin(bench)
    assert statuses(await grant(bench, LEASE, A, generation=2, group=GroupPart(KEY, BUILDER))) == [GrantStatus.GRANTED]
    await bench.groups.freeze(KEY, BUILDER)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A, generation=2)
    await settle(bench, SettleAction.RELEASE, SECOND, A)
    max_deliveries = 2 if why == "exhausted" else None
    (member,) = await renew(bench, regrant=why != "no regrant", max_deliveries=max_deliveries)
    assert member.record is None


async def test_nothing_is_held_beyond_its_age(bench: Bench) -> None:
    await frozen(bench, A)
    for _ in range(6):
        await renew(bench, seconds=AGE_MAX / 5)
        await bench.pass_time(AGE_MAX / 5.5)
    group = await found(bench)
    assert group.remaining_seconds == 0.0  # it was asked for more
    assert group.held_seconds == pytest.approx(group.age_seconds)
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.GRANTED]


async def test_what_has_run_out_is_held_anew(bench: Bench) -> None:
    await frozen(bench, A)
    await bench.pass_time(AGE_MAX + 1)
    await renew(bench, seconds=60.0)
    group = await found(bench)
    assert group.remaining_seconds == pytest.approx(60.0, abs=0.1)
    assert group.held_seconds == pytest.approx(0.0, abs=0.1)
    assert group.age_seconds == pytest.approx(AGE_MAX + 1, abs=0.1)


async def test_many_members_go_in_bites(bench: Bench) -> None:
    many = [CopyId(f"copy-{number:06}") for number in range(2 * BITE + 7)]
    group = await frozen(bench, *many)
    assert group.message_count == len(many)
    assert [one.copy_id for one in await renew(bench)] == many
    assert len(await bench.groups.members(KEY, 0, len(many))) == BITE
    assert [one.copy_id for one in await bench.groups.members(KEY, 2 * BITE, len(many))] == many[2 * BITE :]
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert await settle_all(bench) == ([(one, SettleAction.ACK, SettleStatus.DONE) for one in many], 0)


# ---------------------------------------------------------------- settling


async def test_an_ack_settles_every_group_through_its_epoch_and_none_beyond(bench: Bench) -> None:
    for epoch, copy_id in enumerate((A, B, C), start=1):
        await frozen(bench, copy_id, key=KEY._replace(epoch=epoch), lease=LeaseId(f"lease {epoch}"))
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 2) == (0, 0)
    done = (SettleAction.ACK, SettleStatus.DONE)
    assert await settle_all(bench) == ([(A, *done), (B, *done)], 0)
    assert statuses(await grant(bench, SECOND, A, B, C)) == [GrantStatus.SETTLED, GrantStatus.SETTLED, GrantStatus.HELD]
    for epoch in (0, 1, 2):
        with pytest.raises(LeaseGroupAcked):
            await bench.groups.find(KEY._replace(epoch=epoch))
        with pytest.raises(LeaseGroupAcked):
            await begin(bench, KEY._replace(epoch=epoch))
    assert [one.epoch for one in await bench.groups.groups(SUBSCRIPTION, STREAM)] == [3]
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 2) == (2, 0)
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (0, 0)
    assert await settle_all(bench) == ([], 0)


async def test_a_late_ack_is_good_where_nobody_took_the_message(bench: Bench) -> None:
    await frozen(bench, A, B, C)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, B)
    await settle(bench, SettleAction.EXPIRE, LEASE, C, seconds=600.0)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    settled, lost = await settle_all(bench)
    assert [status for _, _, status in settled] == [SettleStatus.DONE, SettleStatus.LOST, SettleStatus.DONE]
    assert lost == 1
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (2, 1)
    assert (await settle(bench, SettleAction.ACK, SECOND, B)).status is SettleStatus.DONE


async def test_what_was_lost_before_is_not_acked_and_still_counts(bench: Bench) -> None:
    await frozen(bench, A, B)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A)
    await renew(bench)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert await settle_all(bench) == ([(B, SettleAction.ACK, SettleStatus.DONE)], 1)
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (1, 1)


async def test_an_ack_that_was_cut_short_goes_on(bench: Bench) -> None:
    many = [CopyId(f"copy-{number:06}") for number in range(BITE + 7)]
    await frozen(bench, *many)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert (await bench.groups.settle_next(SUBSCRIPTION, STREAM)).more
    await bench.restart()
    assert await bench.groups.half_settled() == [(SUBSCRIPTION, STREAM)]
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (BITE, 0)
    settled, _ = await settle_all(bench)
    assert [copy_id for copy_id, _, _ in settled] == many[BITE:]
    assert await bench.groups.half_settled() == []


async def test_what_nobody_has_read_is_given_back_by_an_ack(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    with pytest.raises(LeaseGroupAcked):
        await add(bench, B)
    assert await settle_all(bench) == ([(A, SettleAction.RELEASE, SettleStatus.DONE)], 0)
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (0, 0)
    assert statuses(await grant(bench, SECOND, A, B)) == [GrantStatus.GRANTED] * 2


async def test_a_release_forgets_later_groups_and_gives_their_messages_back(bench: Bench) -> None:
    for epoch, copy_id in enumerate((A, B, C), start=1):
        await frozen(bench, copy_id, key=KEY._replace(epoch=epoch), lease=LeaseId(f"lease {epoch}"))
    await bench.groups.begin_release(SUBSCRIPTION, STREAM, 1)
    with pytest.raises(LeaseGroupNotFound):
        await copies(bench, KEY._replace(epoch=2))
    released = (SettleAction.RELEASE, SettleStatus.DONE)
    assert await settle_all(bench) == ([(B, *released), (C, *released)], 0)
    assert statuses(await grant(bench, SECOND, A, B, C)) == [GrantStatus.HELD, GrantStatus.GRANTED, GrantStatus.GRANTED]
    assert await bench.groups.find(KEY._replace(epoch=2)) is None
    assert (await begin(bench, KEY._replace(epoch=2))).state is GroupState.FORMING


async def test_a_release_does_not_undo_an_ack(bench: Bench) -> None:
    await frozen(bench, A)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    await bench.groups.begin_release(SUBSCRIPTION, STREAM, 0)
    assert await settle_all(bench) == ([(A, SettleAction.ACK, SettleStatus.DONE)], 0)


async def test_a_stream_without_groups_can_be_acked_and_released(bench: Bench) -> None:
    await bench.groups.begin_release(SUBSCRIPTION, STREAM, 0)
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 5) == (0, 0)
    assert await settle_all(bench) == ([], 0)
    with pytest.raises(LeaseGroupAcked):
        await begin(bench)


# ---------------------------------------------------------------- housekeeping


async def test_what_nobody_comes_for_is_given_up(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A)
    await begin(bench, KEY._replace(epoch=2), lease=SECOND)
    await frozen(bench, B, key=KEY._replace(epoch=3), lease=THIRD)
    await bench.pass_time(INVISIBILITY + 100)
    await bench.groups.collect(forming_seconds=200, older_than_seconds=DAY)
    assert await bench.groups.half_settled() == []
    await bench.pass_time(201)
    await bench.groups.collect(forming_seconds=200, older_than_seconds=DAY)
    await settle_all(bench)
    assert [one.epoch for one in await bench.groups.groups(SUBSCRIPTION)] == [3]
    await bench.pass_time(DAY)
    await bench.groups.collect(forming_seconds=200, older_than_seconds=DAY)
    await settle_all(bench)
    assert await bench.groups.groups(SUBSCRIPTION) == []


async def test_a_watermark_is_kept_while_it_is_used(bench: Bench) -> None:
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 3)
    for _ in range(3):
        await bench.pass_time(DAY / 2)
        await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 3)
        await bench.groups.collect(forming_seconds=200, older_than_seconds=DAY)
    with pytest.raises(LeaseGroupAcked):
        await bench.groups.find(KEY)
    await bench.pass_time(DAY + 1)
    await bench.groups.collect(forming_seconds=200, older_than_seconds=DAY)
    assert await bench.groups.find(KEY) is None


async def test_a_deleted_subscription_leaves_no_group_behind(bench: Bench) -> None:
    other = GroupKey(Subscription(SUBSCRIPTION.topic, GroupName("other")), STREAM, 1)
    await frozen(bench, A)
    await begin(bench, KEY._replace(epoch=2), lease=SECOND)
    await begin(bench, other, lease=THIRD)
    await bench.groups.begin_ack(SUBSCRIPTION, StreamName("acked"), 7)
    await bench.groups.drop(SUBSCRIPTION)
    assert await bench.groups.groups(SUBSCRIPTION) == []
    assert await bench.groups.find(KEY) is None
    assert await bench.groups.find(KEY._replace(stream=StreamName("acked"))) is None
    assert await bench.groups.find(other) is not None


async def test_members_of_several_queues_stand_in_one_order(bench: Bench) -> None:
    await begin(bench)
    part = GroupPart(KEY, BUILDER)
    await grant(bench, LEASE, A, group=part)
    await grant(bench, LEASE, A, B, queue=OTHER_QUEUE, group=part)
    await bench.groups.freeze(KEY, BUILDER)
    members = await bench.groups.members(KEY, 0, 3)
    assert [(one.queue, one.copy_id) for one in members] == [(QUEUE, A), (OTHER_QUEUE, A), (OTHER_QUEUE, B)]
