"""The contract of the lease store: what the engine relies on, over every adapter.

An adapter joins by an entry in ``STORES``: a way to open it on an empty folder, to let time pass, and to restart it.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.lease import (
    GrantAnswer,
    GrantStatus,
    LeaseRecord,
    RecordState,
    SettleAction,
    SettleAnswer,
    SettleStatus,
)
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.leases import GrantEntry, GrantRequest, LeaseStore, SettleEntry
from popgate.runtime.clocks import ManualClock

QUEUE = BrokerQueue("popgate:t:g:0")
OTHER_QUEUE = BrokerQueue("popgate:t:g:1")
DEAD = BrokerQueue("popgate:t:g:dead")
SUBSCRIPTION = Subscription(TopicName("t"), GroupName("g"))
A, B, C = CopyId("copy-a"), CopyId("copy-b"), CopyId("copy-c")
TRANSIENT = CopyId("~node.1.7")
FIRST, SECOND, THIRD = LeaseId("first"), LeaseId("second"), LeaseId("third")
INVISIBILITY = 30.0


class Bench(Protocol):
    """A store under test. ``store`` is another object after ``restart``."""

    @property
    def store(self) -> LeaseStore: ...

    async def pass_time(self, seconds: float) -> None: ...

    async def restart(self) -> None: ...


class SqliteBench:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = ManualClock()
        self._database: Database | None = None
        self.store: LeaseStore

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def restart(self) -> None:
        await self.close()
        self._database = Database(self._folder / "popgate.db", self._clock)
        await self._database.open()
        self.store = SqliteLeaseStore(self._database)

    async def close(self) -> None:
        if self._database is not None:
            await self._database.close()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncGenerator[Bench]:
    bench = SqliteBench(folder)
    try:
        await bench.restart()
        yield bench
    finally:
        await bench.close()


STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[Bench]]] = {"sqlite": sqlite}


@pytest.fixture(params=STORES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Bench]:
    name: str = request.param
    async with STORES[name](tmp_path) as bench:
        yield bench


# ---------------------------------------------------------------- words for the tests


async def grant(
    bench: Bench,
    lease_id: LeaseId,
    *copy_ids: CopyId,
    queue: BrokerQueue = QUEUE,
    epoch: int = 1,
    seconds: float = INVISIBILITY,
    max_deliveries: int | None = None,
    earlier: int = 0,
    generation: int = 1,
    attempt_id: str | None = None,
) -> list[GrantAnswer]:
    return await bench.store.grant(
        GrantRequest(
            subscription=SUBSCRIPTION,
            lease_id=lease_id,
            entries=[GrantEntry(queue, epoch, copy_id, earlier) for copy_id in copy_ids],
            invisibility_seconds=seconds,
            max_deliveries=max_deliveries,
            mode_generation=generation,
            attempt_id=attempt_id,
        )
    )


async def settle(
    bench: Bench,
    action: SettleAction,
    lease_id: LeaseId,
    copy_id: CopyId = A,
    *,
    queue: BrokerQueue = QUEUE,
    seconds: float = 0.0,
    reason: str = "",
) -> SettleAnswer:
    target = DEAD if action in (SettleAction.MOVE, SettleAction.EXHAUST) else None
    target_copy_id = CopyId(f"dead-{copy_id}") if target is not None else None
    entry = SettleEntry(queue, copy_id, lease_id, action, seconds, target, target_copy_id, reason)
    return (await bench.store.settle([entry]))[0]


def statuses(answers: Sequence[GrantAnswer]) -> list[GrantStatus]:
    return [answer.status for answer in answers]


async def leased(bench: Bench, lease_id: LeaseId = FIRST, copy_id: CopyId = A) -> LeaseRecord:
    (answer,) = await grant(bench, lease_id, copy_id)
    assert answer.status is GrantStatus.GRANTED
    assert answer.record is not None
    return answer.record


async def in_state(bench: Bench, state: RecordState) -> None:
    """Bring the record of A, leased as FIRST, into ``state``."""
    await leased(bench)
    match state:
        case RecordState.LEASED:
            return
        case RecordState.EXPIRED:
            await bench.pass_time(INVISIBILITY)
            answer = await settle(bench, SettleAction.EXPIRE, FIRST, seconds=60.0)
        case RecordState.RELEASED:
            answer = await settle(bench, SettleAction.RELEASE, FIRST, seconds=60.0)
        case RecordState.MOVING:
            answer = await settle(bench, SettleAction.MOVE, FIRST)
        case RecordState.ACKED:
            answer = await settle(bench, SettleAction.ACK, FIRST)
        case RecordState.DEAD:
            await settle(bench, SettleAction.MOVE, FIRST)
            answer = await settle(bench, SettleAction.MOVED, FIRST)
    assert answer.status is SettleStatus.DONE
    assert answer.record is not None
    assert answer.record.state is state


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


async def test_an_empty_batch_is_answered_by_nothing(bench: Bench) -> None:
    assert await grant(bench, FIRST) == []
    assert await bench.store.settle([]) == []


async def test_a_full_batch_of_256_and_beyond_is_one_step(bench: Bench) -> None:
    copy_ids = [CopyId(f"copy-{number:03}") for number in range(600)]
    assert statuses(await grant(bench, FIRST, *copy_ids)) == [GrantStatus.GRANTED] * 600
    await bench.restart()
    assert statuses(await grant(bench, SECOND, *copy_ids)) == [GrantStatus.HELD] * 600


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


# ---------------------------------------------------------------- the state diagram

DONE, ALREADY, LOST = SettleStatus.DONE, SettleStatus.ALREADY, SettleStatus.LOST
LEASED, EXPIRED, RELEASED, MOVING, ACKED, DEAD_STATE = RecordState
DIAGRAM = [
    # from, action, answer, state afterwards
    (LEASED, SettleAction.ACK, DONE, ACKED),
    (LEASED, SettleAction.EXTEND, DONE, LEASED),
    (LEASED, SettleAction.RELEASE, DONE, RELEASED),
    (LEASED, SettleAction.EXPIRE, LOST, LEASED),  # it has not run out
    (LEASED, SettleAction.MOVE, DONE, MOVING),
    (LEASED, SettleAction.EXHAUST, LOST, LEASED),
    (LEASED, SettleAction.MOVED, LOST, LEASED),
    (EXPIRED, SettleAction.ACK, DONE, ACKED),
    (EXPIRED, SettleAction.EXTEND, DONE, LEASED),
    (EXPIRED, SettleAction.RELEASE, DONE, RELEASED),
    (EXPIRED, SettleAction.EXPIRE, LOST, EXPIRED),
    (EXPIRED, SettleAction.MOVE, DONE, MOVING),
    (EXPIRED, SettleAction.EXHAUST, LOST, EXPIRED),  # it waits for its retry
    (EXPIRED, SettleAction.MOVED, LOST, EXPIRED),
    (RELEASED, SettleAction.ACK, LOST, RELEASED),
    (RELEASED, SettleAction.EXTEND, LOST, RELEASED),
    (RELEASED, SettleAction.RELEASE, ALREADY, RELEASED),
    (RELEASED, SettleAction.EXPIRE, LOST, RELEASED),
    (RELEASED, SettleAction.MOVE, LOST, RELEASED),
    (RELEASED, SettleAction.MOVED, LOST, RELEASED),
    (MOVING, SettleAction.ACK, LOST, MOVING),
    (MOVING, SettleAction.EXTEND, LOST, MOVING),
    (MOVING, SettleAction.RELEASE, LOST, MOVING),
    (MOVING, SettleAction.EXPIRE, LOST, MOVING),
    (MOVING, SettleAction.MOVE, ALREADY, MOVING),
    (MOVING, SettleAction.EXHAUST, ALREADY, MOVING),
    (MOVING, SettleAction.MOVED, DONE, DEAD_STATE),
    (ACKED, SettleAction.ACK, ALREADY, ACKED),
    (ACKED, SettleAction.EXTEND, LOST, ACKED),
    (ACKED, SettleAction.RELEASE, LOST, ACKED),
    (ACKED, SettleAction.EXPIRE, LOST, ACKED),
    (ACKED, SettleAction.MOVE, LOST, ACKED),
    (ACKED, SettleAction.MOVED, LOST, ACKED),
    (DEAD_STATE, SettleAction.ACK, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.RELEASE, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.MOVE, LOST, DEAD_STATE),
    (DEAD_STATE, SettleAction.MOVED, ALREADY, DEAD_STATE),
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
    # What was answered is what stands: a repeat of the look-up says the same.
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
    ],
)
async def test_a_grant_meets_what_stands(bench: Bench, state: RecordState, status: GrantStatus) -> None:
    await in_state(bench, state)
    (answer,) = await grant(bench, SECOND, A)
    assert answer.status is status
    assert answer.record is not None
    assert (answer.record.state, answer.record.lease_id) == (state, FIRST)


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


async def test_only_the_queues_whose_claim_is_overtaken_are_fenced(bench: Bench) -> None:
    await bench.store.claim(QUEUE)
    await bench.store.claim(QUEUE)
    await bench.store.claim(OTHER_QUEUE)
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=FIRST,
        entries=[GrantEntry(QUEUE, 1, A, 0), GrantEntry(OTHER_QUEUE, 1, A, 0)],
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
    await bench.store.allow_mode(SUBSCRIPTION, 3)
    assert statuses(await grant(bench, FIRST, A, generation=2)) == [GrantStatus.FENCED]
    assert statuses(await grant(bench, FIRST, A, generation=3)) == [GrantStatus.GRANTED]
    await bench.store.allow_mode(SUBSCRIPTION, 2)
    await bench.restart()
    assert statuses(await grant(bench, FIRST, B, generation=2)) == [GrantStatus.FENCED]
    request = GrantRequest(
        subscription=Subscription(TopicName("t"), GroupName("other")),
        lease_id=FIRST,
        entries=[GrantEntry(OTHER_QUEUE, 1, A, 0)],
        invisibility_seconds=INVISIBILITY,
        max_deliveries=None,
        mode_generation=1,
    )
    assert statuses(await bench.store.grant(request)) == [GrantStatus.GRANTED]


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
    await grant(bench, SECOND, C, queue=OTHER_QUEUE)
    await bench.restart()
    loaded = {copy_id: record.state for copy_id, record, _ in await bench.store.load(QUEUE)}
    unsettled = set(RecordState) - {RecordState.ACKED, RecordState.DEAD}
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
    await grant(bench, SECOND, A, attempt_id="try")  # held: it gives nothing and changes nothing
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


async def test_attempts_belong_to_their_subscription(bench: Bench) -> None:
    await grant(bench, FIRST, A, attempt_id="try")
    other = Subscription(TopicName("t"), GroupName("other"))
    assert await bench.store.find_attempt(other, "try") == []


# ---------------------------------------------------------------- together


async def test_of_concurrent_grants_of_one_copy_exactly_one_succeeds(bench: Bench) -> None:
    answers = await asyncio.gather(*(grant(bench, LeaseId(f"lease-{number}"), A) for number in range(20)))
    granted = [answer for (answer,) in answers if answer.status is GrantStatus.GRANTED]
    assert len(granted) == 1
    assert {answer.record for (answer,) in answers} == {granted[0].record}


class Model:
    """What may be true of each copy, written without a look at the domain's tables."""

    def __init__(self) -> None:
        self.now = 0.0
        self.holder: dict[CopyId, LeaseId] = {}
        self.hidden_until: dict[CopyId, float] = {}
        self.state: dict[CopyId, str] = {}
        self.count: dict[CopyId, int] = {}

    def check_grant(self, copy_id: CopyId, lease_id: LeaseId, answer: GrantAnswer, seconds: float) -> None:
        free = self.state.get(copy_id, "free") != "settled" and self.hidden_until.get(copy_id, 0.0) <= self.now
        assert (answer.status is GrantStatus.GRANTED) == free
        if free:
            self.holder[copy_id], self.state[copy_id] = lease_id, "leased"
            self.hidden_until[copy_id] = self.now + seconds
            self.count[copy_id] = self.count.get(copy_id, 0) + 1
            assert answer.record is not None
            assert answer.record.delivery_count == self.count[copy_id]
            assert answer.remaining_seconds == pytest.approx(seconds, abs=1e-3)

    def check_settle(self, entry: SettleEntry, answer: SettleAnswer) -> None:
        copy_id = entry.copy_id
        current, state = self.holder.get(copy_id) == entry.lease_id, self.state.get(copy_id)
        may = current and state in ("leased", "expired")
        if entry.action is SettleAction.EXPIRE:
            may = current and state == "leased" and self.hidden_until[copy_id] <= self.now
        assert (answer.status is SettleStatus.DONE) == may
        if answer.status is SettleStatus.ALREADY:
            assert current
        if not may:
            return
        match entry.action:
            case SettleAction.ACK:
                self.state[copy_id] = "settled"
            case SettleAction.RELEASE:
                self.state[copy_id] = "released"
                self.hidden_until[copy_id] = self.now + entry.seconds
            case SettleAction.EXPIRE:
                self.state[copy_id] = "expired"
                self.hidden_until[copy_id] = self.now + entry.seconds
            case _:
                self.state[copy_id] = "leased"
                self.hidden_until[copy_id] = self.now + entry.seconds


class Grant(NamedTuple):
    copy_ids: list[CopyId]
    seconds: float


class Settle(NamedTuple):
    """``orders``: copy, how many leases ago its lease id was made, action, seconds."""

    orders: list[tuple[CopyId, int, SettleAction, float]]


class Wait(NamedTuple):
    seconds: float


class Restart(NamedTuple):
    pass


Step = Grant | Settle | Wait | Restart
COPIES = st.sampled_from([A, B, C])
SECONDS = st.sampled_from([0.25, 1.0, 4.0])
ACTIONS = st.sampled_from([SettleAction.ACK, SettleAction.EXTEND, SettleAction.RELEASE, SettleAction.EXPIRE])
ORDERS = st.lists(st.tuples(COPIES, st.integers(0, 4), ACTIONS, SECONDS), min_size=1, max_size=4)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(Grant, st.lists(COPIES, min_size=1, max_size=4), SECONDS),
    st.builds(Settle, ORDERS),
    st.builds(Wait, st.sampled_from([0.5, 2.0])),
    st.builds(Restart),
)


@pytest.mark.parametrize("name", STORES)
@given(script=st.lists(STEPS, max_size=30))
def test_no_copy_has_two_live_leases_and_no_settlement_succeeds_falsely(name: str, script: list[Step]) -> None:
    asyncio.run(play(name, script))


async def play(name: str, script: list[Step]) -> None:
    model = Model()
    lease_ids = [LeaseId("never-given")]
    with tempfile.TemporaryDirectory() as folder:
        async with STORES[name](Path(folder)) as bench:
            for step in script:
                match step:
                    case Grant(copy_ids, seconds):
                        lease_id = LeaseId(f"lease-{len(lease_ids)}")
                        lease_ids.append(lease_id)
                        granted = await grant(bench, lease_id, *copy_ids, seconds=seconds)
                        for copy_id, grant_answer in zip(copy_ids, granted, strict=True):
                            model.check_grant(copy_id, lease_id, grant_answer, seconds)
                    case Settle(orders):
                        entries = [
                            SettleEntry(QUEUE, copy_id, lease_ids[max(0, len(lease_ids) - 1 - back)], action, seconds)
                            for copy_id, back, action, seconds in orders
                        ]
                        for entry, answer in zip(entries, await bench.store.settle(entries), strict=True):
                            model.check_settle(entry, answer)
                    case Wait(seconds):
                        model.now += seconds
                        await bench.pass_time(seconds)
                    case Restart():
                        await bench.restart()
