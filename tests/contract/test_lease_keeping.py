"""The contract of the lease store: claims, modes, retention, and attempts."""

import pytest

from contract.lease_bench import (
    FIRST,
    INVISIBILITY,
    OTHER_QUEUE,
    QUEUE,
    SECOND,
    SUBSCRIPTION,
    THIRD,
    TRANSIENT,
    A,
    B,
    Bench,
    C,
    bench,
    grant,
    leased,
    open_bench,
    settle,
    statuses,
)
from popgate.domain.lease import (
    SETTLED_STATES,
    GrantAnswer,
    GrantStatus,
    RecordState,
    SettleAction,
    SettleStatus,
)
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

__all__ = ["bench", "open_bench"]


# ---------------------------------------------------------------- claims and modes


async def test_each_claim_has_a_higher_epoch_also_after_a_restart_and_a_deleted_queue(bench: Bench) -> None:
    epochs = [await bench.store.claim(QUEUE), await bench.store.claim(QUEUE)]
    await bench.store.drop_queue(QUEUE)
    epochs.append(await bench.store.claim(QUEUE))
    await bench.restart()
    epochs.append(await bench.store.claim(QUEUE))
    assert epochs == sorted(set(epochs))
    assert epochs[0] >= 1
    assert await bench.store.claim(OTHER_QUEUE) >= 1


async def test_an_overtaken_claim_is_fenced_and_changes_nothing(bench: Bench) -> None:
    old = await bench.store.claim(QUEUE)
    new = await bench.store.claim(QUEUE)
    (answer,) = await grant(bench, FIRST, A, epoch=old)
    assert answer == GrantAnswer(GrantStatus.FENCED, 0.0, None)
    assert await bench.store.load(QUEUE) == []
    assert statuses(await grant(bench, FIRST, A, epoch=new)) == [GrantStatus.GRANTED]


async def test_an_owner_writes_back_what_the_store_has_lost(bench: Bench) -> None:
    """Leases hold and settle as before, and newer entries of the store are unchanged."""
    epoch = await bench.store.claim(QUEUE)
    for copy_id in (A, B, C, TRANSIENT):
        (answer,) = await grant(bench, FIRST, copy_id, epoch=epoch, seconds=60.0)
        assert answer.record is not None
    await settle(bench, SettleAction.RELEASE, FIRST, B, seconds=10.0)
    await settle(bench, SettleAction.MOVE, FIRST, C)
    remembered = await bench.store.load(QUEUE)
    assert {one.copy_id for one in remembered} == {A, B, C, TRANSIENT}
    await bench.store.drop_queue(QUEUE)
    await grant(bench, SECOND, B, epoch=epoch)
    await settle(bench, SettleAction.ACK, SECOND, B)
    await bench.pass_time(5.0)
    above = epoch + 10**15
    assert await bench.store.restore(QUEUE, remembered, above=above) > above
    loaded = {one.copy_id: one for one in await bench.store.load(QUEUE)}
    was = {one.copy_id: one for one in remembered}
    assert loaded.keys() == {A, C, TRANSIENT}
    assert loaded[A].remaining_seconds == was[A].remaining_seconds
    for copy_id, (_, one, _) in loaded.items():
        before = was[copy_id].record
        assert one.changed_at == before.changed_at + 5.0
        assert one._replace(changed_at=0.0, visible_at=0.0) == before._replace(changed_at=0.0, visible_at=0.0)
    assert (await settle(bench, SettleAction.ACK, FIRST, A)).status is SettleStatus.DONE
    assert (await settle(bench, SettleAction.MOVED, FIRST, C)).status is SettleStatus.DONE
    assert (await settle(bench, SettleAction.ACK, FIRST, TRANSIENT)).status is SettleStatus.DONE
    assert (await settle(bench, SettleAction.ACK, FIRST, B)).status is SettleStatus.LOST
    assert statuses(await grant(bench, THIRD, A, epoch=epoch)) == [GrantStatus.FENCED]


async def test_only_the_queues_whose_claim_is_overtaken_are_fenced(bench: Bench) -> None:
    old = await bench.store.claim(QUEUE)
    await bench.store.claim(QUEUE)
    other = await bench.store.claim(OTHER_QUEUE)
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=FIRST,
        entries=[GrantEntry(QUEUE, old, A, 0), GrantEntry(OTHER_QUEUE, other, A, 0)],
        invisibility_seconds=INVISIBILITY,
        max_deliveries=None,
        mode_generation=1,
    )
    assert statuses(await bench.store.grant(request)) == [GrantStatus.FENCED, GrantStatus.GRANTED]


async def test_a_claim_leaves_leases_as_they_are_and_their_settlement_passes(bench: Bench) -> None:
    await leased(bench)
    epoch = await bench.store.claim(QUEUE)
    assert statuses(await grant(bench, SECOND, A, epoch=epoch)) == [GrantStatus.HELD]
    assert (await settle(bench, SettleAction.ACK, FIRST)).status is SettleStatus.DONE


async def test_an_overtaken_mode_generation_is_fenced_for_its_subscription_only(bench: Bench) -> None:
    assert await bench.store.allow_mode(SUBSCRIPTION, 0) == 0
    assert await bench.store.allow_mode(SUBSCRIPTION, 3) == 3
    assert statuses(await grant(bench, FIRST, A, generation=2)) == [GrantStatus.WRONG_MODE]
    assert statuses(await grant(bench, FIRST, A, generation=3)) == [GrantStatus.GRANTED]
    assert await bench.store.allow_mode(SUBSCRIPTION, 2) == 3
    await bench.restart()
    assert statuses(await grant(bench, FIRST, B, generation=2)) == [GrantStatus.WRONG_MODE]
    request = GrantRequest(
        subscription=Subscription(TopicName("t"), GroupName("other")),
        lease_id=FIRST,
        entries=[GrantEntry(OTHER_QUEUE, 1, A, 0)],
        invisibility_seconds=INVISIBILITY,
        max_deliveries=None,
        mode_generation=1,
    )
    assert statuses(await bench.store.grant(request)) == [GrantStatus.GRANTED]


async def test_a_release_under_an_overtaken_mode_generation_is_lost(bench: Bench) -> None:
    await bench.store.allow_mode(SUBSCRIPTION, 1)
    assert statuses(await grant(bench, FIRST, A, B)) == [GrantStatus.GRANTED] * 2
    await bench.store.allow_mode(SUBSCRIPTION, 2)
    late, timely = (
        SettleEntry(QUEUE, copy_id, FIRST, SettleAction.RELEASE, under=(SUBSCRIPTION, generation))
        for copy_id, generation in ((A, 1), (B, 2))
    )
    answers = await bench.store.settle([late, timely])
    assert [answer.status for answer in answers] == [SettleStatus.LOST, SettleStatus.DONE]


async def test_the_reason_of_a_move_stays_when_it_is_finished(bench: Bench) -> None:
    await grant(bench, FIRST, A)
    dead = BrokerQueue("dead")
    move = SettleEntry(QUEUE, A, FIRST, SettleAction.MOVE, target=dead, target_copy_id=B, reason="bad")
    await bench.store.settle([move])
    await bench.store.settle([SettleEntry(QUEUE, A, FIRST, SettleAction.MOVED)])
    assert (await bench.store.peek(QUEUE, [A]))[A].reason == "bad"


# ---------------------------------------------------------------- transient records


async def test_a_claim_drops_the_records_of_transient_copies_of_its_queue_only(bench: Bench) -> None:
    await leased(bench, copy_id=A)
    await leased(bench, copy_id=TRANSIENT)
    await grant(bench, FIRST, TRANSIENT, queue=OTHER_QUEUE)
    await bench.store.claim(QUEUE)
    assert [copy_id for copy_id, _, _ in await bench.store.load(QUEUE)] == [A]
    assert [copy_id for copy_id, _, _ in await bench.store.load(OTHER_QUEUE)] == [TRANSIENT]
    assert (await settle(bench, SettleAction.ACK, FIRST, TRANSIENT)).status is SettleStatus.LOST


async def test_forget_drops_transient_records_and_no_others(bench: Bench) -> None:
    other = CopyId("~node.1.8")
    for copy_id in (A, TRANSIENT, other):
        await leased(bench, copy_id=copy_id)
    await bench.store.forget(QUEUE, [TRANSIENT, A])
    assert {copy_id for copy_id, _, _ in await bench.store.load(QUEUE)} == {A, other}
    assert (await settle(bench, SettleAction.ACK, FIRST, TRANSIENT)).status is SettleStatus.LOST
    await bench.store.forget(QUEUE, [])


# ---------------------------------------------------------------- loading and record keeping


async def test_load_gives_every_record_that_is_not_settled(bench: Bench) -> None:
    copies = {state: CopyId(f"copy-{state}") for state in RecordState}
    for copy_id in copies.values():
        await leased(bench, copy_id=copy_id)
    await settle(bench, SettleAction.RELEASE, FIRST, copies[RecordState.RELEASED], seconds=60.0)
    await settle(bench, SettleAction.MOVE, FIRST, copies[RecordState.MOVING])
    await settle(bench, SettleAction.ACK, FIRST, copies[RecordState.ACKED])
    await settle(bench, SettleAction.MOVE, FIRST, copies[RecordState.DEAD])
    await settle(bench, SettleAction.MOVED, FIRST, copies[RecordState.DEAD])
    await bench.pass_time(INVISIBILITY)
    await settle(bench, SettleAction.EXPIRE, FIRST, copies[RecordState.EXPIRED], seconds=60.0)
    await settle(bench, SettleAction.DISCARD, FIRST, copies[RecordState.DISCARDED])
    await grant(bench, SECOND, C, queue=OTHER_QUEUE)
    await bench.restart()
    loaded = {copy_id: record.state for copy_id, record, _ in await bench.store.load(QUEUE)}
    unsettled = set(RecordState) - SETTLED_STATES
    assert loaded == {copies[state]: state for state in unsettled}


async def test_load_of_many_records_is_whole(bench: Bench) -> None:
    copy_ids = [CopyId(f"copy-{number:05}") for number in range(10_500)]
    for start in range(0, len(copy_ids), 500):
        await grant(bench, FIRST, *copy_ids[start : start + 500])
    for start in range(0, 6_000, 500):
        entries = [SettleEntry(QUEUE, copy_id, FIRST, SettleAction.ACK) for copy_id in copy_ids[start : start + 500]]
        await bench.store.settle(entries)
    assert sorted(copy_id for copy_id, _, _ in await bench.store.load(QUEUE)) == copy_ids[6_000:]
    await bench.pass_time(100.0)
    assert await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=10.0) == 6_000
    await bench.store.drop_queue(QUEUE)
    assert await bench.store.load(QUEUE) == []


async def test_trim_drops_settled_records_that_are_proved_and_old(bench: Bench) -> None:
    settled_at: dict[CopyId, float] = {}
    for copy_id in (A, B):
        await leased(bench, copy_id=copy_id)
        settled_at[copy_id] = (await settle(bench, SettleAction.ACK, FIRST, copy_id)).settled_at
        await bench.pass_time(100.0)
    await leased(bench, copy_id=C)
    await grant(bench, SECOND, A, queue=OTHER_QUEUE)
    await settle(bench, SettleAction.ACK, SECOND, A, queue=OTHER_QUEUE)
    await bench.pass_time(1_000.0)
    trim = bench.store.trim
    assert await trim(QUEUE, settled_before=settled_at[A], older_than_seconds=900.0) == 0  # the bound itself stays
    assert await trim(QUEUE, settled_before=settled_at[B], older_than_seconds=5_000.0) == 0
    assert await trim(QUEUE, settled_before=settled_at[B], older_than_seconds=900.0) == 1
    assert statuses(await grant(bench, THIRD, B)) == [GrantStatus.SETTLED]
    assert await trim(QUEUE, settled_before=settled_at[B] + 5_000.0, older_than_seconds=900.0) == 1
    assert [copy_id for copy_id, _, _ in await bench.store.load(QUEUE)] == [C]
    assert statuses(await grant(bench, THIRD, A, queue=OTHER_QUEUE)) == [GrantStatus.SETTLED]
    assert statuses(await grant(bench, THIRD, A)) == [GrantStatus.GRANTED]  # forgotten: as if it were new


async def test_collect_drops_whatever_has_not_changed_on_any_queue(bench: Bench) -> None:
    await leased(bench, copy_id=A)
    await leased(bench, copy_id=B)
    await settle(bench, SettleAction.ACK, FIRST, B)
    await grant(bench, FIRST, C, queue=OTHER_QUEUE)
    await bench.pass_time(1_000.0)
    await grant(bench, SECOND, A)
    assert await bench.store.collect(older_than_seconds=2_000.0) == 0
    assert await bench.store.collect(older_than_seconds=900.0) == 2
    assert await bench.store.collect(older_than_seconds=900.0) == 0
    assert [copy_id for copy_id, _, _ in await bench.store.load(QUEUE)] == [A]
    assert await bench.store.load(OTHER_QUEUE) == []
    await bench.pass_time(901.0)
    assert await bench.store.collect(older_than_seconds=900.0) == 1
    assert (await settle(bench, SettleAction.ACK, SECOND, A)).status is SettleStatus.LOST


async def test_drop_queue_drops_the_records_of_that_queue(bench: Bench) -> None:
    await leased(bench, copy_id=A)
    await grant(bench, FIRST, A, queue=OTHER_QUEUE)
    await bench.store.drop_queue(QUEUE)
    assert await bench.store.load(QUEUE) == []
    assert (await settle(bench, SettleAction.ACK, FIRST)).status is SettleStatus.LOST
    assert len(await bench.store.load(OTHER_QUEUE)) == 1


# ---------------------------------------------------------------- attempts


async def found(bench: Bench, attempt_id: str) -> list[tuple[BrokerQueue, CopyId, LeaseId]]:
    leases = await bench.store.find_attempt(SUBSCRIPTION, attempt_id)
    return [(lease.queue, lease.copy_id, lease.record.lease_id) for lease in leases]


async def test_an_attempt_finds_its_live_leases_in_the_order_they_were_given(bench: Bench) -> None:
    await grant(bench, FIRST, B, attempt_id="try")
    await grant(bench, FIRST, A, queue=OTHER_QUEUE, attempt_id="try")
    await grant(bench, FIRST, C, A, attempt_id="try")
    await grant(bench, SECOND, CopyId("copy-d"), attempt_id="other")
    expected = [(QUEUE, B, FIRST), (OTHER_QUEUE, A, FIRST), (QUEUE, C, FIRST), (QUEUE, A, FIRST)]
    assert await found(bench, "try") == expected
    await bench.restart()
    assert await found(bench, "try") == expected
    await bench.pass_time(10.0)
    leases = await bench.store.find_attempt(SUBSCRIPTION, "try")
    assert [lease.remaining_seconds for lease in leases] == [pytest.approx(20.0, abs=0.1)] * 4
    assert [lease.record.state for lease in leases] == [RecordState.LEASED] * 4


async def test_an_attempt_does_not_find_what_was_settled_ended_or_went_to_somebody_else(bench: Bench) -> None:
    copy_ids = [CopyId(f"copy-{number}") for number in range(4)]
    await grant(bench, FIRST, *copy_ids, attempt_id="try")
    await settle(bench, SettleAction.ACK, FIRST, copy_ids[0])
    await settle(bench, SettleAction.RELEASE, FIRST, copy_ids[1])
    await grant(bench, SECOND, copy_ids[1])
    await settle(bench, SettleAction.EXTEND, FIRST, copy_ids[3], seconds=600.0)
    assert [copy_id for _, copy_id, _ in await found(bench, "try")] == copy_ids[2:]
    await bench.pass_time(INVISIBILITY)
    assert [copy_id for _, copy_id, _ in await found(bench, "try")] == copy_ids[3:]
    assert await found(bench, "never") == []


async def test_a_new_lease_id_begins_the_attempt_anew(bench: Bench) -> None:
    await grant(bench, FIRST, A, attempt_id="try")
    await grant(bench, SECOND, A, attempt_id="try")  # held: it grants nothing and changes nothing
    assert await found(bench, "try") == [(QUEUE, A, FIRST)]
    await grant(bench, SECOND, B, attempt_id="try")
    assert await found(bench, "try") == [(QUEUE, B, SECOND)]


async def test_record_keeping_never_drops_an_attempt_whose_lease_lives(bench: Bench) -> None:
    await grant(bench, FIRST, A, B, attempt_id="try")
    await settle(bench, SettleAction.EXTEND, FIRST, B, seconds=10_000.0)
    for _ in range(3):
        await bench.pass_time(3_000.0)
        await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=900.0)
        await bench.store.collect(older_than_seconds=100_000.0)
        assert await found(bench, "try") == [(QUEUE, B, FIRST)]
    await bench.pass_time(3_000.0)
    await bench.store.collect(older_than_seconds=100_000.0)
    assert await found(bench, "try") == []


async def test_an_attempt_finds_a_lease_that_was_extended_after_it_ran_out_however_late(bench: Bench) -> None:
    await grant(bench, FIRST, A, B, attempt_id="try")
    for _ in range(3):
        await bench.pass_time(3_000.0)
        await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=900.0)
        await bench.store.collect(older_than_seconds=100_000.0)
        assert await found(bench, "try") == []
    await settle(bench, SettleAction.EXPIRE, FIRST, B, seconds=60.0)
    await bench.store.collect(older_than_seconds=100_000.0)
    assert (await settle(bench, SettleAction.EXTEND, FIRST, B, seconds=600.0)).status is SettleStatus.DONE
    assert await found(bench, "try") == [(QUEUE, B, FIRST)]
    assert (await settle(bench, SettleAction.EXTEND, FIRST, A, seconds=600.0)).status is SettleStatus.DONE
    assert await found(bench, "try") == [(QUEUE, A, FIRST), (QUEUE, B, FIRST)]


async def test_attempts_belong_to_their_subscription(bench: Bench) -> None:
    await grant(bench, FIRST, A, attempt_id="try")
    other = Subscription(TopicName("t"), GroupName("other"))
    assert await bench.store.find_attempt(other, "try") == []
