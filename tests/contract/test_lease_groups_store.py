"""The contract of the lease groups' half of the state port, over every adapter: frozen groups.

``test_lease_groups_forming`` covers how they are formed.
"""

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
from contract.lease_group_bench import (
    AGE_MAX,
    BUILDER,
    DAY,
    KEY,
    LEASE,
    STREAM,
    add,
    begin,
    copies,
    found,
    frozen,
    renew,
    settle_all,
)
from popgate.domain.errors import Conflict, LeaseGroupAcked, LeaseGroupNotFound
from popgate.domain.lease import GrantStatus, RecordState, SettleAction, SettleStatus
from popgate.domain.lease_group import GroupKey, GroupState
from popgate.domain.names import CopyId, GroupName, LeaseId, StreamName, Subscription
from popgate.ports.lease_groups import STEP_MEMBERS_MAX, Renewal
from popgate.ports.leases import GroupPart

__all__ = ["bench", "open_bench"]


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


async def test_under_a_mode_that_is_over_only_leases_that_last_go_on(bench: Bench) -> None:
    await frozen(bench, A)
    await bench.store.allow_mode(SUBSCRIPTION, 2)
    (member,) = await renew(bench, regrant=False)
    assert member.record is not None
    await bench.pass_time(INVISIBILITY + 1)
    (member,) = await renew(bench)
    assert member.record is None
    assert statuses(await grant(bench, SECOND, A, generation=2)) == [GrantStatus.GRANTED]


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
    many = [CopyId(f"copy-{number:06}") for number in range(2 * STEP_MEMBERS_MAX + 7)]
    group = await frozen(bench, *many)
    assert group.message_count == len(many)
    assert [one.copy_id for one in await renew(bench)] == many
    assert len(await bench.groups.members(KEY, 0, len(many))) == STEP_MEMBERS_MAX
    assert [one.copy_id for one in await bench.groups.members(KEY, 2 * STEP_MEMBERS_MAX, len(many))] == many[
        2 * STEP_MEMBERS_MAX :
    ]
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert await settle_all(bench) == ([(one, SettleAction.ACK, SettleStatus.DONE) for one in many], 0)


async def test_a_group_is_held_for_longer_only_once_all_of_its_members_are(bench: Bench) -> None:
    await frozen(bench, *(CopyId(f"copy-{number:06}") for number in range(STEP_MEMBERS_MAX + 1)))
    ends_at = await bench.groups.begin_renewal(KEY, seconds=INVISIBILITY + 100.0, age_seconds_max=AGE_MAX)
    renewal = Renewal(ends_at, regrant=False, max_deliveries=None, mode_generation=1)
    assert (await bench.groups.renew(KEY, 0, renewal)).next_position == STEP_MEMBERS_MAX
    assert (await found(bench)).remaining_seconds <= INVISIBILITY
    assert (await bench.groups.renew(KEY, STEP_MEMBERS_MAX, renewal)).next_position is None
    assert (await found(bench)).remaining_seconds > INVISIBILITY + 50.0


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
    many = [CopyId(f"copy-{number:06}") for number in range(STEP_MEMBERS_MAX + 7)]
    await frozen(bench, *many)
    await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1)
    assert (await bench.groups.settle_next(SUBSCRIPTION, STREAM)).more
    await bench.restart()
    assert await bench.groups.subscriptions() == [SUBSCRIPTION]
    assert await bench.groups.half_settled(SUBSCRIPTION) == [STREAM]
    assert await bench.groups.begin_ack(SUBSCRIPTION, STREAM, 1) == (STEP_MEMBERS_MAX, 0)
    settled, _ = await settle_all(bench)
    assert [copy_id for copy_id, _, _ in settled] == many[STEP_MEMBERS_MAX:]
    assert await bench.groups.half_settled(SUBSCRIPTION) == []


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
    assert await bench.groups.half_settled(SUBSCRIPTION) == []
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


async def test_the_number_of_streams_is_limited(bench: Bench) -> None:
    async def ack(stream: str, through: int = 1) -> None:
        await bench.groups.begin_ack(SUBSCRIPTION, StreamName(stream), through, streams_max=2)

    await ack("a")
    await ack("b")
    with pytest.raises(Conflict, match="has 2 streams"):
        await ack("c")
    with pytest.raises(Conflict, match="has 2 streams"):
        await bench.groups.begin(KEY, lease_id=LEASE, builder=BUILDER, slices=1, streams_max=2)
    await ack("b", 2)
    other = Subscription(SUBSCRIPTION.topic, GroupName("other"))
    await bench.groups.begin_ack(other, STREAM, 1, streams_max=2)
    await bench.groups.drop(SUBSCRIPTION)
    await ack("c")


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
