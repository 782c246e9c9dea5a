"""The contract of the dedup store, over every adapter."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from contract.lease_bench import Bench, bench, open_bench
from popgate.domain.lease import GrantStatus, SettleAction
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.dedup import DedupEntry
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

FIRST, PENDING, CONFIRMED = "first", "pending", "confirmed"
ORDERS, BILLS = TopicName("orders"), TopicName("bills")
WINDOW = 300.0
MONTH = 30 * 86_400.0
QUEUE = BrokerQueue("popgate:orders:g:0")
LEASE = LeaseId("lease")

__all__ = ["bench", "open_bench"]


class Reserved(NamedTuple):
    status: str
    entry: DedupEntry


def entry(dedup_id: str, copy: str, *, message_id: str = "", index: int = 0) -> DedupEntry:
    return DedupEntry(dedup_id, CopyId(copy), message_id or copy, index)


async def reserve(
    bench: Bench, *entries: DedupEntry, topic: TopicName = ORDERS, window: float = WINDOW
) -> list[Reserved]:
    """Return one answer an entry, in order: its status, and what is stored for its id now."""
    standing = await bench.dedup.reserve(topic, entries, window_seconds=window)
    assert standing.keys() <= {one.dedup_id for one in entries}
    answers: list[Reserved] = []
    for one in entries:
        if (found := standing.get(one.dedup_id)) is None:
            answers.append(Reserved(FIRST, one))
        else:
            answers.append(Reserved(CONFIRMED if found.is_confirmed else PENDING, found.entry))
    return answers


def statuses(answers: Sequence[Reserved]) -> list[str]:
    return [answer.status for answer in answers]


async def test_an_id_is_first_then_pending_then_confirmed_and_always_the_first_copy(bench: Bench) -> None:
    first = entry("d", "copy-1", message_id="order 17", index=3)
    assert await reserve(bench, first) == [Reserved(FIRST, first)]
    assert await reserve(bench, entry("d", "copy-2", message_id="another", index=1)) == [Reserved(PENDING, first)]
    await bench.dedup.confirm(ORDERS, [first])
    assert await reserve(bench, entry("d", "copy-3")) == [Reserved(CONFIRMED, first)]


async def test_a_batch_answers_each_entry_in_order(bench: Bench) -> None:
    a, b = entry("a", "copy-a"), entry("b", "copy-b", message_id="b's own")
    await reserve(bench, a, b)
    await bench.dedup.confirm(ORDERS, [a])
    c = entry("c", "copy-c")
    answers = await reserve(bench, entry("b", "copy-4"), c, entry("a", "copy-5"))
    assert answers == [Reserved(PENDING, b), Reserved(FIRST, c), Reserved(CONFIRMED, a)]


async def test_a_large_batch_is_reserved_confirmed_and_cancelled_whole(bench: Bench) -> None:
    entries = [entry(f"d{number}", f"copy-{number}") for number in range(600)]
    assert statuses(await reserve(bench, *entries)) == [FIRST] * 600
    await bench.dedup.confirm(ORDERS, entries[:300])
    await bench.dedup.cancel(ORDERS, entries[300:])
    again = [entry(f"d{number}", f"again-{number}") for number in range(600)]
    assert statuses(await reserve(bench, *again)) == [CONFIRMED] * 300 + [FIRST] * 300


async def test_a_reservation_that_is_repeated_as_it_was_gets_the_same_answer(bench: Bench) -> None:
    entries = [entry("a", "copy-a"), entry("b", "copy-b")]
    assert statuses(await reserve(bench, *entries)) == [FIRST, FIRST]
    assert statuses(await reserve(bench, *entries)) == [FIRST, FIRST], "its answer may have been lost"


async def test_topics_have_ids_of_their_own(bench: Bench) -> None:
    await bench.dedup.confirm(ORDERS, [(await reserve(bench, entry("d", "copy-1")))[0].entry])
    assert statuses(await reserve(bench, entry("d", "copy-2"), topic=BILLS)) == [FIRST]
    await bench.dedup.drop_topic(ORDERS)
    assert statuses(await reserve(bench, entry("d", "copy-3"))) == [FIRST], "a deleted topic begins anew"
    assert statuses(await reserve(bench, entry("d", "copy-4"), topic=BILLS)) == [PENDING]


async def test_ids_are_told_apart_exactly(bench: Bench) -> None:
    ids = ["d", "D", " d", "d ", "\u00e9", "e\u0301", "\x00", "\U0001f600" * 128]
    assert statuses(await reserve(bench, *(entry(one, f"copy-{n}") for n, one in enumerate(ids)))) == [FIRST] * len(ids)


@pytest.mark.parametrize("confirmed", [False, True])
async def test_an_entry_ends_with_its_window_counted_from_the_first(bench: Bench, confirmed: bool) -> None:
    first = entry("d", "copy-1")
    await reserve(bench, first)
    if confirmed:
        await bench.dedup.confirm(ORDERS, [first])
    await bench.pass_time(WINDOW - 1)
    assert statuses(await reserve(bench, entry("d", "copy-2"))) == [CONFIRMED if confirmed else PENDING]
    await bench.pass_time(1)
    assert statuses(await reserve(bench, entry("d", "copy-3"), entry("e", "copy-4"))) == [FIRST, FIRST]
    assert await reserve(bench, entry("d", "copy-5")) == [Reserved(PENDING, entry("d", "copy-3"))]


async def test_a_late_word_on_a_copy_does_not_touch_the_one_that_took_its_place(bench: Bench) -> None:
    first, second = entry("d", "copy-1"), entry("d", "copy-2")
    await reserve(bench, first)
    await bench.pass_time(WINDOW)
    await reserve(bench, second)
    await bench.dedup.confirm(ORDERS, [first])
    await bench.dedup.cancel(ORDERS, [first])
    assert await reserve(bench, entry("d", "copy-3")) == [Reserved(PENDING, second)]


async def test_what_was_surely_not_stored_is_first_again(bench: Bench) -> None:
    first, second = entry("d", "copy-1"), entry("d", "copy-2")
    await reserve(bench, first)
    await bench.dedup.cancel(ORDERS, [first])
    assert await reserve(bench, second) == [Reserved(FIRST, second)]


async def test_what_is_confirmed_or_was_repeated_is_not_cancelled(bench: Bench) -> None:
    stored, repeated = entry("stored", "copy-1"), entry("repeated", "copy-2")
    await reserve(bench, stored, repeated)
    await bench.dedup.confirm(ORDERS, [stored])
    await reserve(bench, entry("repeated", "copy-3"))  # by another publisher, which may have stored it by now
    await bench.dedup.cancel(ORDERS, [stored, repeated])
    answers = await reserve(bench, entry("stored", "copy-4"), entry("repeated", "copy-5"))
    assert answers == [Reserved(CONFIRMED, stored), Reserved(PENDING, repeated)]


async def test_everything_is_there_after_a_restart(bench: Bench) -> None:
    a, b = entry("a", "copy-a", message_id="a's own", index=2), entry("b", "copy-b")
    await reserve(bench, a, b)
    await bench.dedup.confirm(ORDERS, [a])
    await bench.restart()
    answers = await reserve(bench, entry("a", "copy-c"), entry("b", "copy-d"))
    assert answers == [Reserved(CONFIRMED, a), Reserved(PENDING, b)]


async def test_ended_entries_are_collected_and_no_others(bench: Bench) -> None:
    old = [entry(f"old-{number}", f"copy-{number}") for number in range(1_500)]
    await reserve(bench, *old)
    await bench.dedup.confirm(ORDERS, old)
    await bench.pass_time(WINDOW / 2)
    young = entry("young", "copy-young")
    await reserve(bench, young)
    assert await bench.dedup.collect(window_seconds=WINDOW, noted_seconds=MONTH) == 0
    await bench.pass_time(WINDOW / 2)
    assert await bench.dedup.collect(window_seconds=WINDOW, noted_seconds=MONTH) == 1_500
    assert await bench.dedup.collect(window_seconds=WINDOW, noted_seconds=MONTH) == 0
    assert statuses(await reserve(bench, entry("young", "copy-2"), entry("old-7", "copy-3"))) == [PENDING, FIRST]


async def acked(bench: Bench, copy_id: str) -> None:
    """Let a consumer get the copy and ack it."""
    epoch = await bench.store.claim(QUEUE)
    request = GrantRequest(
        subscription=Subscription(ORDERS, GroupName("g")),
        lease_id=LEASE,
        entries=[GrantEntry(QUEUE, epoch, CopyId(copy_id), 0)],
        invisibility_seconds=30.0,
        max_deliveries=None,
        mode_generation=1,
    )
    assert [answer.status for answer in await bench.store.grant(request)] == [GrantStatus.GRANTED]
    await bench.store.settle([SettleEntry(QUEUE, CopyId(copy_id), LEASE, SettleAction.ACK)])


async def test_the_settled_record_of_a_copy_that_may_stand_twice_is_not_trimmed(bench: Bench) -> None:
    await reserve(bench, entry("once", "copy-1"), entry("perhaps twice", "copy-2"))
    for copy in ("copy-1", "copy-2"):
        await acked(bench, copy)
    assert statuses(await reserve(bench, entry("perhaps twice", "copy-3"))) == [PENDING]
    await bench.pass_time(MONTH - 10)
    await bench.dedup.collect(window_seconds=WINDOW, noted_seconds=MONTH)
    assert await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=900.0) == 1
    await bench.pass_time(10)
    await bench.dedup.collect(window_seconds=WINDOW, noted_seconds=MONTH)
    assert await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=900.0) == 1
