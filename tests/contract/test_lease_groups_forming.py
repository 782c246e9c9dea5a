"""The contract of lease groups while they are formed, over every adapter: which messages become members, once, and
where.
"""

import asyncio

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
    open_bench,
    settle,
    statuses,
)
from contract.lease_group_bench import BUILDER, KEY, LEASE, STREAM, add, begin, copies, found, frozen, renew, settle_all
from popgate.domain.errors import Conflict, LeaseGroupNotFound
from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
from popgate.domain.lease_group import GROUPS_MAX, GroupKey, GroupState
from popgate.domain.names import GroupName, StreamName, Subscription
from popgate.ports.leases import GroupPart

__all__ = ["bench", "open_bench"]


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
    assert statuses(await grant(bench, THIRD, B)) == [GrantStatus.GRANTED]  # the refusal leased nothing
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


# ---------------------------------------------------------------- forming that outlasts the leases


@pytest.mark.parametrize("reopened", [False, True], ids=["live", "after a restart"])
async def test_a_member_whose_lease_ran_out_is_no_second_member(bench: Bench, *, reopened: bool) -> None:
    """It is no new delivery either: no client took it, so its lease continues, as it would by a renewal."""
    await begin(bench)
    await add(bench, A, B)
    await bench.pass_time(INVISIBILITY + 1)
    if reopened:
        await bench.restart()
    again = await grant(bench, LEASE, A, C, max_deliveries=1, group=GroupPart(KEY, BUILDER))
    assert statuses(again) == [GrantStatus.GRANTED] * 2
    assert [one.record and one.record.delivery_count for one in again] == [1, 1]
    assert (await found(bench)).message_count == 3
    assert (await found(bench)).remaining_seconds == 0.0, "the lease of B has run out"
    await renew(bench, regrant=False)
    group = await bench.groups.freeze(KEY, BUILDER)
    assert group is not None
    assert (group.message_count, group.span, group.lost) == (3, 3, 0)
    members = await bench.groups.members(KEY, 0, 9)
    assert [(one.position, one.copy_id, one.delivery_count) for one in members] == [(0, A, 1), (1, B, 1), (2, C, 1)]
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert await settle_all(bench) == ([(one, SettleAction.ACK, SettleStatus.DONE) for one in (A, B, C)], 0)


async def test_a_member_whose_lease_waits_for_its_retry_is_held(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A)
    await bench.pass_time(INVISIBILITY + 1)
    await settle(bench, SettleAction.EXPIRE, LEASE, A, seconds=60.0)
    assert await add(bench, A) == [GrantStatus.HELD]
    await bench.pass_time(61.0)
    assert await add(bench, A) == [GrantStatus.GRANTED]
    assert (await found(bench)).message_count == 1


async def test_a_member_that_a_rival_had_meanwhile_keeps_its_place(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A, B)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A)
    await settle(bench, SettleAction.RELEASE, SECOND, A)
    assert await add(bench, A, C) == [GrantStatus.GRANTED] * 2
    assert (await found(bench)).message_count == 3
    await renew(bench, regrant=False)
    await bench.groups.freeze(KEY, BUILDER)
    members = await bench.groups.members(KEY, 0, 9)
    assert [(one.copy_id, one.delivery_count) for one in members] == [(A, 3), (B, 1), (C, 1)]


async def test_a_member_that_was_taken_back_out_of_turn_stands_behind_whom_it_waited_for(bench: Bench) -> None:
    await begin(bench)
    await add(bench, B, C)
    await settle(bench, SettleAction.RELEASE, LEASE, B)
    assert await add(bench, A, B) == [GrantStatus.GRANTED] * 2
    group = await bench.groups.freeze(KEY, BUILDER)
    assert group is not None
    assert group.message_count == 3
    assert await copies(bench) == [C, A, B]


async def test_what_others_settled_meanwhile_is_no_member(bench: Bench) -> None:
    await begin(bench)
    await add(bench, A, B, C)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A)
    await settle(bench, SettleAction.ACK, SECOND, A)
    await settle(bench, SettleAction.EXHAUST, LEASE, B)
    assert await add(bench, A, B) == [GrantStatus.SETTLED, GrantStatus.MOVING]
    await renew(bench, regrant=False)
    group = await bench.groups.freeze(KEY, BUILDER)
    assert group is not None
    assert (group.message_count, group.lost) == (1, 0)
    assert await copies(bench) == [C]


async def test_one_copy_on_two_queues_is_two_members(bench: Bench) -> None:
    await begin(bench)
    part = GroupPart(KEY, BUILDER)
    await grant(bench, LEASE, A, group=part)
    await bench.pass_time(INVISIBILITY + 1)
    await grant(bench, SECOND, A, queue=OTHER_QUEUE)
    await settle(bench, SettleAction.RELEASE, SECOND, A, queue=OTHER_QUEUE)
    assert statuses(await grant(bench, LEASE, A, queue=OTHER_QUEUE, group=part)) == [GrantStatus.GRANTED]
    assert [one.queue for one in await bench.groups.members(KEY, 0, 9)] == [QUEUE, OTHER_QUEUE]
