"""The contract of the lease store: which grants and settlements succeed, over every adapter."""

import pytest

from contract.lease_bench import (
    DEAD,
    FIRST,
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
    in_state,
    leased,
    open_bench,
    settle,
    statuses,
)
from popgate.adapters.sqlite import lease_records
from popgate.domain.lease import (
    GrantStatus,
    RecordState,
    SettleAction,
    SettleStatus,
)
from popgate.domain.names import BrokerQueue, CopyId
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

__all__ = ["bench", "open_bench"]


# ---------------------------------------------------------------- grants


async def test_a_lease_excludes_every_other_until_it_ends(bench: Bench) -> None:
    record = await leased(bench)
    assert (record.state, record.lease_id, record.delivery_count, record.epoch) == (RecordState.LEASED, FIRST, 1, 1)
    await bench.pass_time(20.0)
    (answer,) = await grant(bench, SECOND, A)
    assert answer.status is GrantStatus.HELD
    assert answer.record == record
    assert answer.remaining_seconds == pytest.approx(10.0, abs=0.1)
    await bench.pass_time(10.1)
    (answer,) = await grant(bench, SECOND, A)
    assert answer.status is GrantStatus.GRANTED
    assert answer.record is not None
    assert (answer.record.lease_id, answer.record.delivery_count) == (SECOND, 2)
    assert answer.record.first_delivered_at == record.first_delivered_at
    assert answer.remaining_seconds == pytest.approx(INVISIBILITY)


async def test_answers_come_one_an_entry_in_order(bench: Bench) -> None:
    await grant(bench, FIRST, B)
    await settle(bench, SettleAction.ACK, FIRST, B)
    assert statuses(await grant(bench, SECOND, A, B, A, C)) == [
        GrantStatus.GRANTED,
        GrantStatus.SETTLED,
        GrantStatus.HELD,
        GrantStatus.GRANTED,
    ]


async def test_a_batch_may_span_queues_and_a_copy_is_another_on_each(bench: Bench) -> None:
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=FIRST,
        entries=[GrantEntry(QUEUE, 1, A, 0), GrantEntry(OTHER_QUEUE, 1, A, 0), GrantEntry(QUEUE, 1, B, 0)],
        invisibility_seconds=INVISIBILITY,
        max_deliveries=None,
        mode_generation=1,
    )
    assert statuses(await bench.store.grant(request)) == [GrantStatus.GRANTED] * 3
    assert (await settle(bench, SettleAction.ACK, FIRST, A)).status is SettleStatus.DONE
    assert statuses(await grant(bench, SECOND, A, queue=OTHER_QUEUE)) == [GrantStatus.HELD]


async def test_who_stands_behind_one_that_is_not_given_is_not_given_either(bench: Bench) -> None:
    """Nor is it recorded for the attempt: another proxy may be asked to repeat it at once."""
    await grant(bench, FIRST, A)
    await settle(bench, SettleAction.ACK, FIRST, A)
    await grant(bench, FIRST, B)
    alone = CopyId("alone")
    lines = {A: 1, B: 1, C: 1, alone: 2}
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=SECOND,
        entries=[GrantEntry(QUEUE, 1, copy_id, 0, line) for copy_id, line in lines.items()],
        invisibility_seconds=INVISIBILITY,
        max_deliveries=None,
        mode_generation=1,
        attempt_id="attempt",
    )
    expected = [GrantStatus.SETTLED, GrantStatus.HELD, GrantStatus.BEHIND, GrantStatus.GRANTED]
    assert statuses(await bench.store.grant(request)) == expected
    assert [lease.copy_id for lease in await bench.store.find_attempt(SUBSCRIPTION, "attempt")] == [alone]
    await settle(bench, SettleAction.ACK, FIRST, B)
    expected = [GrantStatus.SETTLED, GrantStatus.SETTLED, GrantStatus.GRANTED, GrantStatus.HELD]
    assert statuses(await bench.store.grant(request)) == expected
    assert (await grant(bench, THIRD, C))[0].record is not None


async def test_an_empty_batch_is_answered_by_nothing(bench: Bench) -> None:
    assert await grant(bench, FIRST) == []
    assert await bench.store.settle([]) == []


async def test_a_full_batch_of_256_and_beyond_is_one_step(bench: Bench) -> None:
    copy_ids = [CopyId(f"copy-{number:03}") for number in range(600)]
    assert statuses(await grant(bench, FIRST, *copy_ids)) == [GrantStatus.GRANTED] * 600
    await bench.restart()
    assert statuses(await grant(bench, SECOND, *copy_ids)) == [GrantStatus.HELD] * 600


async def test_more_leases_than_are_kept_in_memory_are_settled_like_all_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_records, "RECORDS_CACHED_MAX", 16)
    copy_ids = [CopyId(f"copy-{number:02}") for number in range(40)]
    for start in range(0, 40, 8):
        assert statuses(await grant(bench, FIRST, *copy_ids[start : start + 8])) == [GrantStatus.GRANTED] * 8
    assert statuses(await grant(bench, SECOND, *copy_ids)) == [GrantStatus.HELD] * 40
    for copy_id in copy_ids:
        assert (await settle(bench, SettleAction.ACK, SECOND, copy_id)).status is SettleStatus.LOST
        assert (await settle(bench, SettleAction.ACK, FIRST, copy_id)).status is SettleStatus.DONE
    assert statuses(await grant(bench, SECOND, *copy_ids)) == [GrantStatus.SETTLED] * 40


async def test_earlier_deliveries_count_only_without_a_record(bench: Bench) -> None:
    (answer,) = await grant(bench, FIRST, A, earlier=5, max_deliveries=3)
    assert answer.record is not None
    assert (answer.status, answer.record.delivery_count) == (GrantStatus.GRANTED, 6)
    await settle(bench, SettleAction.RELEASE, FIRST)
    (answer,) = await grant(bench, SECOND, A, earlier=50)
    assert answer.record is not None
    assert answer.record.delivery_count == 7


async def test_past_max_deliveries_a_copy_is_exhausted_and_can_be_moved_by_its_last_lease(bench: Bench) -> None:
    for lease_id in (FIRST, SECOND):
        assert statuses(await grant(bench, lease_id, A, max_deliveries=2)) == [GrantStatus.GRANTED]
        assert (await settle(bench, SettleAction.EXHAUST, lease_id)).status is SettleStatus.LOST
        await settle(bench, SettleAction.RELEASE, lease_id)
    (answer,) = await grant(bench, THIRD, A, max_deliveries=2)
    assert answer.status is GrantStatus.EXHAUSTED
    assert answer.record is not None
    assert (answer.record.lease_id, answer.record.delivery_count) == (SECOND, 2)
    moving = await settle(bench, SettleAction.EXHAUST, SECOND, reason="max_deliveries")
    assert moving.status is SettleStatus.DONE
    (answer,) = await grant(bench, THIRD, A, max_deliveries=2)
    assert answer.status is GrantStatus.MOVING
    assert answer.record is not None
    assert (answer.record.target, answer.record.target_copy_id) == (DEAD, "dead-copy-a")
    assert answer.record.reason == "max_deliveries"


async def test_who_was_exhausted_by_a_lease_that_is_taken_back_is_not_moved(bench: Bench) -> None:
    await grant(bench, FIRST, A, max_deliveries=2)
    await settle(bench, SettleAction.RELEASE, FIRST)
    await grant(bench, SECOND, A, max_deliveries=2)
    await bench.pass_time(INVISIBILITY + 1)
    assert statuses(await grant(bench, THIRD, A, max_deliveries=2)) == [GrantStatus.EXHAUSTED]
    assert (await settle(bench, SettleAction.WITHDRAW, SECOND)).status is SettleStatus.DONE
    assert (await settle(bench, SettleAction.EXHAUST, SECOND)).status is SettleStatus.LOST
    (answer,) = await grant(bench, THIRD, A, max_deliveries=2)
    assert answer.record is not None
    assert (answer.status, answer.record.delivery_count) == (GrantStatus.GRANTED, 2)


# ---------------------------------------------------------------- the state diagram

DONE, ALREADY, LOST = SettleStatus.DONE, SettleStatus.ALREADY, SettleStatus.LOST
LEASED, EXPIRED, RELEASED, MOVING, ACKED, DEAD_STATE, DISCARDED = RecordState
DIAGRAM = [
    # from, action, answer, state afterwards
    (LEASED, SettleAction.ACK, DONE, ACKED),
    (LEASED, SettleAction.EXTEND, DONE, LEASED),
    (LEASED, SettleAction.RELEASE, DONE, RELEASED),
    (LEASED, SettleAction.WITHDRAW, DONE, RELEASED),
    (LEASED, SettleAction.EXPIRE, LOST, LEASED),  # it has not run out
    (LEASED, SettleAction.MOVE, DONE, MOVING),
    (LEASED, SettleAction.EXHAUST, LOST, LEASED),
    (LEASED, SettleAction.MOVED, LOST, LEASED),
    (LEASED, SettleAction.UNDO, LOST, LEASED),
    (EXPIRED, SettleAction.ACK, DONE, ACKED),
    (EXPIRED, SettleAction.EXTEND, DONE, LEASED),
    (EXPIRED, SettleAction.RELEASE, DONE, RELEASED),
    (EXPIRED, SettleAction.WITHDRAW, DONE, RELEASED),
    (EXPIRED, SettleAction.EXPIRE, LOST, EXPIRED),
    (EXPIRED, SettleAction.MOVE, DONE, MOVING),
    (EXPIRED, SettleAction.EXHAUST, LOST, EXPIRED),  # it waits for its retry
    (EXPIRED, SettleAction.MOVED, LOST, EXPIRED),
    (RELEASED, SettleAction.ACK, LOST, RELEASED),
    (RELEASED, SettleAction.EXTEND, LOST, RELEASED),
    (RELEASED, SettleAction.RELEASE, ALREADY, RELEASED),
    (RELEASED, SettleAction.WITHDRAW, ALREADY, RELEASED),
    (RELEASED, SettleAction.EXPIRE, LOST, RELEASED),
    (RELEASED, SettleAction.MOVE, LOST, RELEASED),
    (RELEASED, SettleAction.MOVED, LOST, RELEASED),
    (RELEASED, SettleAction.UNDO, ALREADY, RELEASED),
    (MOVING, SettleAction.ACK, LOST, MOVING),
    (MOVING, SettleAction.EXTEND, LOST, MOVING),
    (MOVING, SettleAction.RELEASE, LOST, MOVING),
    (MOVING, SettleAction.WITHDRAW, LOST, MOVING),
    (MOVING, SettleAction.EXPIRE, LOST, MOVING),
    (MOVING, SettleAction.MOVE, ALREADY, MOVING),
    (MOVING, SettleAction.EXHAUST, ALREADY, MOVING),
    (MOVING, SettleAction.MOVED, DONE, DEAD_STATE),
    (MOVING, SettleAction.UNDO, DONE, RELEASED),
    (ACKED, SettleAction.ACK, ALREADY, ACKED),
    (ACKED, SettleAction.EXTEND, LOST, ACKED),
    (ACKED, SettleAction.RELEASE, LOST, ACKED),
    (ACKED, SettleAction.WITHDRAW, LOST, ACKED),
    (ACKED, SettleAction.EXPIRE, LOST, ACKED),
    (ACKED, SettleAction.MOVE, LOST, ACKED),
    (ACKED, SettleAction.MOVED, LOST, ACKED),
    (ACKED, SettleAction.UNDO, LOST, ACKED),
    (DEAD_STATE, SettleAction.ACK, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.RELEASE, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.MOVE, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.MOVED, ALREADY, DEAD_STATE),
    (DEAD_STATE, SettleAction.UNDO, LOST, DEAD_STATE),
    (LEASED, SettleAction.DISCARD, LOST, LEASED),  # a leased message does not expire
    (EXPIRED, SettleAction.DISCARD, LOST, EXPIRED),  # it waits for its retry
    (RELEASED, SettleAction.DISCARD, LOST, RELEASED),
    (MOVING, SettleAction.DISCARD, LOST, MOVING),
    (ACKED, SettleAction.DISCARD, LOST, ACKED),
    (DEAD_STATE, SettleAction.DISCARD, LOST, DEAD_STATE),
    (DISCARDED, SettleAction.ACK, LOST, DISCARDED),
    (DISCARDED, SettleAction.EXTEND, LOST, DISCARDED),
    (DISCARDED, SettleAction.MOVE, LOST, DISCARDED),
    (DISCARDED, SettleAction.DISCARD, ALREADY, DISCARDED),
]


@pytest.mark.parametrize("reopened", [False, True], ids=["live", "after a restart"])
@pytest.mark.parametrize(("before", "action", "status", "after"), DIAGRAM)
async def test_a_settlement_follows_the_diagram(
    bench: Bench, before: RecordState, action: SettleAction, status: SettleStatus, after: RecordState, *, reopened: bool
) -> None:
    await in_state(bench, before)
    if reopened:
        await bench.restart()
    answer = await settle(bench, action, FIRST, seconds=90.0)
    assert answer.record is not None
    assert (answer.status, answer.record.state) == (status, after)
    # The answer is final: a repeat of the look-up gives the same.
    assert (await settle(bench, SettleAction.MOVED, THIRD)).record == answer.record
    await bench.restart()
    assert (await settle(bench, SettleAction.MOVED, THIRD)).record == answer.record


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (RecordState.LEASED, GrantStatus.HELD),
        (RecordState.EXPIRED, GrantStatus.HELD),
        (RecordState.RELEASED, GrantStatus.HELD),
        (RecordState.MOVING, GrantStatus.MOVING),
        (RecordState.ACKED, GrantStatus.SETTLED),
        (RecordState.DEAD, GrantStatus.SETTLED),
        (RecordState.DISCARDED, GrantStatus.SETTLED),
    ],
)
async def test_a_grant_meets_what_stands(bench: Bench, state: RecordState, status: GrantStatus) -> None:
    await in_state(bench, state)
    (answer,) = await grant(bench, SECOND, A)
    assert answer.status is status
    assert answer.record is not None
    assert (answer.record.state, answer.record.lease_id) == (state, FIRST)


async def test_an_undone_move_is_visible_at_once_and_may_be_begun_again(bench: Bench) -> None:
    await in_state(bench, MOVING)
    undone = await settle(bench, SettleAction.UNDO, FIRST)
    assert undone.remaining_seconds == 0.0
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.GRANTED]
    assert (await settle(bench, SettleAction.MOVED, FIRST)).status is LOST
    assert (await settle(bench, SettleAction.MOVE, SECOND)).status is DONE


async def test_what_was_withdrawn_was_no_delivery(bench: Bench) -> None:
    await leased(bench)
    await bench.pass_time(10.0)
    withdrawn = await settle(bench, SettleAction.WITHDRAW, FIRST)
    assert withdrawn.record is not None
    assert (withdrawn.record.state, withdrawn.record.delivery_count) == (RELEASED, 0)
    assert (await settle(bench, SettleAction.WITHDRAW, FIRST)).record == withdrawn.record
    (again,) = await grant(bench, SECOND, A, max_deliveries=1, earlier=7)
    assert again.status is GrantStatus.GRANTED
    assert again.record is not None
    assert again.record.delivery_count == 1
    assert again.record.first_delivered_at == pytest.approx(withdrawn.record.first_delivered_at + 10.0, abs=0.1)
    await settle(bench, SettleAction.RELEASE, SECOND)
    await leased(bench, THIRD)
    withdrawn = await settle(bench, SettleAction.WITHDRAW, THIRD)
    assert withdrawn.record is not None
    assert withdrawn.record.delivery_count == 1
    assert withdrawn.record.first_delivered_at == again.record.first_delivered_at


async def test_a_peek_tells_what_stands_and_changes_nothing(bench: Bench) -> None:
    await leased(bench)
    await leased(bench, copy_id=B)
    acked = await settle(bench, SettleAction.ACK, FIRST, B)
    for _ in range(2):
        seen = await bench.store.peek(QUEUE, [A, CopyId("nobody"), B])
        assert {copy_id: record.state for copy_id, record in seen.items()} == {A: LEASED, B: ACKED}
        assert seen[B] == acked.record
        await bench.restart()
    assert await bench.store.peek(BrokerQueue("another"), [A]) == {}
    assert await bench.store.peek(QUEUE, []) == {}


@pytest.mark.parametrize("state", [RecordState.LEASED, RecordState.EXPIRED, RecordState.RELEASED])
async def test_what_is_visible_again_can_be_discarded_for_good(bench: Bench, state: RecordState) -> None:
    await in_state(bench, state)
    await bench.pass_time(100.0)
    assert (await settle(bench, SettleAction.DISCARD, SECOND)).status is SettleStatus.DONE, "whoever had it last"
    assert (await settle(bench, SettleAction.DISCARD, FIRST)).status is SettleStatus.ALREADY
    assert (await settle(bench, SettleAction.ACK, FIRST)).status is SettleStatus.LOST, "never a false success"
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.SETTLED]


async def test_an_expired_lease_still_acks_until_somebody_else_has_the_message(bench: Bench) -> None:
    await leased(bench)
    await leased(bench, copy_id=B)
    await bench.pass_time(INVISIBILITY + 1)
    assert (await settle(bench, SettleAction.ACK, FIRST, A)).status is SettleStatus.DONE
    assert statuses(await grant(bench, SECOND, B)) == [GrantStatus.GRANTED]
    late = await settle(bench, SettleAction.ACK, FIRST, B)
    assert late.status is SettleStatus.LOST
    assert late.record is not None
    assert late.record.lease_id == SECOND
    assert (await settle(bench, SettleAction.ACK, SECOND, B)).status is SettleStatus.DONE


async def test_a_settlement_without_a_record_is_lost(bench: Bench) -> None:
    answer = await settle(bench, SettleAction.ACK, FIRST)
    assert (answer.status, answer.record, answer.remaining_seconds) == (SettleStatus.LOST, None, 0.0)


async def test_remaining_seconds_are_counted_from_the_write_and_never_negative(bench: Bench) -> None:
    await leased(bench)
    await bench.pass_time(10.0)
    extended = await settle(bench, SettleAction.EXTEND, FIRST, seconds=300.0)
    assert extended.remaining_seconds == pytest.approx(300.0)
    await bench.pass_time(100.0)
    (held,) = await grant(bench, SECOND, A)
    assert held.remaining_seconds == pytest.approx(200.0, abs=0.1)
    (loaded,) = await bench.store.load(QUEUE)
    assert loaded.remaining_seconds == pytest.approx(200.0, abs=0.1)
    await bench.pass_time(1_000.0)
    assert (await bench.store.load(QUEUE))[0].remaining_seconds == 0.0
    assert (await settle(bench, SettleAction.ACK, SECOND)).remaining_seconds == 0.0


async def test_a_release_with_a_delay_hides_the_message_that_long(bench: Bench) -> None:
    await leased(bench)
    answer = await settle(bench, SettleAction.RELEASE, FIRST, seconds=5.0, reason="try later")
    assert answer.remaining_seconds == pytest.approx(5.0)
    assert answer.record is not None
    assert answer.record.reason == "try later"
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.HELD]
    await bench.pass_time(5.1)
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.GRANTED]


async def test_entries_on_one_copy_take_effect_one_after_the_other(bench: Bench) -> None:
    await leased(bench)
    await leased(bench, copy_id=B)
    actions = [SettleAction.EXTEND, SettleAction.RELEASE, SettleAction.RELEASE, SettleAction.ACK]
    entries = [SettleEntry(QUEUE, A, FIRST, action, 60.0) for action in actions]
    entries.insert(1, SettleEntry(QUEUE, B, FIRST, SettleAction.ACK))
    answers = await bench.store.settle(entries)
    assert [answer.status for answer in answers] == [DONE, DONE, DONE, ALREADY, LOST]
    assert [copy_id for copy_id, _, _ in await bench.store.load(QUEUE)] == [A]
    (record,) = [record for _, record, _ in await bench.store.load(QUEUE)]
    assert record.state is RecordState.RELEASED


async def test_any_text_survives_in_ids_and_reasons(bench: Bench) -> None:
    odd = [CopyId(text) for text in ("", "a\x00b", "a\x00c", "'; DROP TABLE lease; --", "%_[]", "ü\u2028𝄞", "x" * 255)]
    assert statuses(await grant(bench, FIRST, *odd)) == [GrantStatus.GRANTED] * len(odd)
    for copy_id in odd:
        answer = await settle(bench, SettleAction.RELEASE, FIRST, copy_id, seconds=60.0, reason=copy_id)
        assert answer.status is SettleStatus.DONE
    await bench.restart()
    assert {copy_id: record.reason for copy_id, record, _ in await bench.store.load(QUEUE)} == {
        copy_id: copy_id for copy_id in odd
    }


# ---------------------------------------------------------------- the greatest age of a lease


@pytest.mark.parametrize("reopened", [False, True], ids=["live", "after a restart"])
async def test_no_extension_makes_a_lease_older_than_it_may_be(bench: Bench, *, reopened: bool) -> None:
    granted = await leased(bench)
    for passed, remaining in ((20.0, 60.0), (40.0, 40.0), (39.0, 1.0)):
        await bench.pass_time(passed)
        if reopened:
            await bench.restart()
        answer = await settle(bench, SettleAction.EXTEND, FIRST, seconds=60.0, age_max=100.0)
        assert answer.status is DONE
        assert answer.remaining_seconds == pytest.approx(remaining, abs=0.1)
        assert answer.record is not None
        assert answer.record.leased_at == granted.leased_at == granted.changed_at
    assert statuses(await grant(bench, SECOND, A)) == [GrantStatus.HELD]
    await bench.pass_time(1.1)
    answer = await settle(bench, SettleAction.EXTEND, FIRST, seconds=60.0, age_max=100.0)
    assert (answer.status, answer.remaining_seconds) == (LOST, 0.0)
    assert (await settle(bench, SettleAction.ACK, FIRST)).status is DONE, "nobody took it: an ack is as good as ever"


async def test_the_next_lease_of_a_message_is_as_young_as_any(bench: Bench) -> None:
    await leased(bench)
    await bench.pass_time(100.0)
    await leased(bench, SECOND)
    answer = await settle(bench, SettleAction.EXTEND, SECOND, seconds=60.0, age_max=100.0)
    assert answer.remaining_seconds == pytest.approx(60.0)


async def test_a_lease_that_ran_out_goes_on_up_to_its_greatest_age(bench: Bench) -> None:
    await leased(bench)
    await leased(bench, copy_id=B)
    await bench.pass_time(90.0)
    await settle(bench, SettleAction.EXPIRE, FIRST, B, seconds=600.0)
    for copy_id in (A, B):
        answer = await settle(bench, SettleAction.EXTEND, FIRST, copy_id, seconds=60.0, age_max=100.0)
        assert answer.status is DONE
        assert answer.remaining_seconds == pytest.approx(10.0, abs=0.1)


async def test_a_greatest_age_that_was_lowered_takes_nothing_away(bench: Bench) -> None:
    await leased(bench)
    await bench.pass_time(10.0)
    answer = await settle(bench, SettleAction.EXTEND, FIRST, seconds=60.0, age_max=5.0)
    assert answer.status is DONE
    assert answer.remaining_seconds == pytest.approx(INVISIBILITY - 10.0, abs=0.1)
    answer = await settle(bench, SettleAction.EXTEND, FIRST, seconds=3.0, age_max=5.0)
    assert answer.status is DONE
    assert answer.remaining_seconds == pytest.approx(3.0), "as asked: it is shorter"


async def test_only_extensions_are_bounded_by_the_age(bench: Bench) -> None:
    await leased(bench)
    await bench.pass_time(10.0)
    answer = await settle(bench, SettleAction.RELEASE, FIRST, seconds=600.0, age_max=5.0)
    assert answer.status is DONE
    assert answer.remaining_seconds == pytest.approx(600.0)
