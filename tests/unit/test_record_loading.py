"""A claimed queue learns all its records at once, as it would learn them one by one, and with few objects."""

import sqlite3
from itertools import count
from pathlib import Path

from popgate.adapters.sqlite.lease_records import LatestRecords, intern_queues, read_unsettled
from popgate.adapters.sqlite.schema import SCHEMA, UPGRADES
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, LeaseId
from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.record_loading import heard, learn_all
from popgate.engine.queue.state import QueueState
from popgate.ports.leases import LoadedRecord

NOW = 1_000.0


def _state() -> QueueState:
    budget = BufferBudget(1 << 20)
    return QueueState(
        0,
        adopted=False,
        budget=budget,
        sequence=count(1),
        mint_transient=lambda: CopyId("transient"),
        lacking=LackingQueues(budget),
    )


def _record(state: RecordState, lease: str = "lease") -> LeaseRecord:
    return LeaseRecord(state, LeaseId(lease), NOW + 60, 1, NOW, NOW, 1, NOW)


def _seen(message: BufferedMessage) -> tuple[MessageState, LeaseId, float, int]:
    return message.state, message.lease_id, message.deadline, message.delivery_count


def test_records_that_are_learned_together_have_the_same_effects_as_one_by_one() -> None:
    loaded = [
        LoadedRecord(CopyId(f"{state}-{remaining:g}"), _record(state, f"{remaining:g}"), remaining)
        for state in RecordState
        for remaining in (60.0, 30.0, 0.0)
    ]
    together, alone = _state(), _state()
    effects = learn_all(together, loaded, NOW)
    each = [alone.learn(*one, NOW)[1] for one in loaded]
    assert {key: _seen(one) for key, one in together.messages.items()} == {
        key: _seen(one) for key, one in alone.messages.items()
    }
    for name in ("leased", "expired", "moves", "ready"):
        expected = [message.copy_id for one in each for message in getattr(one, name)]
        assert [message.copy_id for message in getattr(effects, name)] == expected
    assert effects.has_fewer_out
    assert together.deadlines.next_at == alone.deadlines.next_at == NOW + 30.0
    assert together.evidence.detached == alone.evidence.detached


def test_a_report_changes_no_message_about_which_the_store_is_asked_and_no_ended_transient_one() -> None:
    state = _state()
    asked, known = state.known(CopyId("asked")), state.known(CopyId("known"))
    asked.enter(MessageState.GRANTING)
    copies = [asked.copy_id, known.copy_id, CopyId(f"{TRANSIENT_PREFIX}ended"), CopyId("new")]
    reported = [LoadedRecord(copy_id, _record(RecordState.LEASED), 60.0) for copy_id in copies]
    assert [one.copy_id for one in heard(state, reported)] == ["known", "new"]


def test_messages_that_were_leased_together_share_the_object_of_their_deadline() -> None:
    state = _state()
    copies = [CopyId(f"{number}") for number in range(3)]
    learn_all(state, [LoadedRecord(copy_id, _record(RecordState.LEASED), 60.0) for copy_id in copies], NOW)
    assert len({id(state.messages[copy_id].deadline) for copy_id in copies}) == 1


def test_equal_records_of_neighbours_are_loaded_as_one_object(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "records.db")
    for statement in (*SCHEMA, *(one for number in UPGRADES for one in UPGRADES[number])):
        connection.execute(statement)
    queue = BrokerQueue("queue")
    queue_id = intern_queues(connection, [queue])[queue]
    first, second = _record(RecordState.LEASED, "first"), _record(RecordState.RELEASED, "second")
    records = {CopyId(f"copy {number:04}"): first if number < 700 else second for number in range(1_400)}
    LatestRecords().write(connection, {(queue_id, copy_id): record for copy_id, record in records.items()})
    loaded: list[LoadedRecord] = []
    after: str | None = None
    parts = 0
    while parts == 0 or after is not None:
        some, after = read_unsettled(connection, queue_id, after, lambda: NOW + 15.0)
        loaded, parts = [*loaded, *some], parts + 1
    connection.close()
    assert {one.copy_id: one.record for one in loaded} == records
    assert {one.remaining_seconds for one in loaded} == {45.0}
    assert len({id(one.record) for one in loaded}) == 2 + parts - 1
