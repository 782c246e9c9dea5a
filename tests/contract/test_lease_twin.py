"""Every adapter decides as the domain does: its pure functions on a dictionary are the store's reference.

The contract says what must be true; this says that nothing else is, for any order of any calls: an adapter that repeats
the domain's tables (a script can't import them) repeats all of them.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.lease_bench import DEAD, FIRST, QUEUE, SECOND, SUBSCRIPTION, THIRD, A, B, Bench, OpenBench, open_bench
from popgate.domain.lease import (
    GrantAnswer,
    GrantStatus,
    LeaseRecord,
    SettleAction,
    SettleStatus,
    decide_grant,
    decide_settle,
)
from popgate.domain.names import CopyId, LeaseId
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

__all__ = ["open_bench"]

EPOCH = 7


class Grant(NamedTuple):
    lease_id: LeaseId
    copy_ids: list[CopyId]
    seconds: float
    max_deliveries: int | None
    earlier: int
    in_line: bool
    expired: Mapping[LeaseId, str] | None


class Settle(NamedTuple):
    entries: list[SettleEntry]


class Wait(NamedTuple):
    seconds: float


class Allow(NamedTuple):
    generation: int


Step = Grant | Settle | Wait | Allow
LEASES = st.sampled_from([FIRST, SECOND, THIRD])
COPIES = st.sampled_from([A, B])
# Sums of these are exact, in seconds as in microseconds.
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 8.0])
ENTRIES = st.builds(
    SettleEntry,
    st.just(QUEUE),
    COPIES,
    LEASES,
    st.sampled_from(list(SettleAction)),
    SECONDS,
    st.sampled_from([None, DEAD]),
    st.sampled_from([None, CopyId("moved")]),
    st.sampled_from(["", "why", "\x1fr", "why\x1fx{}"]),
    st.sampled_from([inf, 2.0, 0.0]),
    st.sampled_from([None, (SUBSCRIPTION, 1), (SUBSCRIPTION, 2)]),
)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(
        Grant,
        LEASES,
        st.lists(COPIES, min_size=1, max_size=3),
        SECONDS,
        st.sampled_from([None, 1, 2]),
        st.sampled_from([0, 3]),
        st.booleans(),
        st.sampled_from([None, {FIRST: '\x1fe{"c":"w-1"}', SECOND: '\x1fe{"c":"ß"}'}]),
    ),
    st.builds(Settle, st.lists(ENTRIES, min_size=1, max_size=4)),
    st.builds(Wait, SECONDS),
    st.builds(Allow, st.sampled_from([1, 2])),
)


@given(script=st.lists(STEPS, max_size=40))
def test_a_store_answers_as_the_domain_does(open_bench: OpenBench, script: list[Step]) -> None:
    asyncio.run(play(open_bench, script))


async def play(open_bench: OpenBench, script: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_bench(Path(folder)) as bench:
            nobody = SettleEntry(QUEUE, CopyId("nobody"), FIRST, SettleAction.ACK)
            (asked,) = await bench.store.settle([nobody])
            now = asked.settled_at
            twin: dict[CopyId, LeaseRecord] = {}
            needed = 0
            for step in script:
                match step:
                    case Grant():
                        await check_grant(bench, twin, step, now)
                    case Settle(entries):
                        await check_settle(bench, twin, entries, now, needed)
                    case Allow(generation):
                        needed = max(needed, generation)
                        assert await bench.store.allow_mode(SUBSCRIPTION, generation) == needed
                    case Wait(seconds):
                        now += seconds
                        await bench.pass_time(seconds)


async def check_grant(bench: Bench, twin: dict[CopyId, LeaseRecord], step: Grant, now: float) -> None:
    request = GrantRequest(
        subscription=SUBSCRIPTION,
        lease_id=step.lease_id,
        entries=[GrantEntry(QUEUE, EPOCH, copy_id, step.earlier, int(step.in_line)) for copy_id in step.copy_ids],
        invisibility_seconds=step.seconds,
        max_deliveries=step.max_deliveries,
        mode_generation=2,
        expired_attempts=step.expired,
    )
    is_held_up = False
    for copy_id, answer in zip(step.copy_ids, await bench.store.grant(request), strict=True):
        if is_held_up:
            assert answer == GrantAnswer(GrantStatus.BEHIND, 0.0, None)
            continue
        expected = decide_grant(
            twin.get(copy_id),
            now=now,
            lease_id=step.lease_id,
            invisibility_seconds=step.seconds,
            max_deliveries=step.max_deliveries,
            earlier_deliveries=step.earlier,
            epoch=EPOCH,
            expired_attempts=step.expired,
        )
        assert answer.status is expected.status
        assert answer.remaining_seconds == pytest.approx(expected.remaining_seconds, abs=1e-4)
        check_record(answer.record, expected.record)
        if expected.status is GrantStatus.GRANTED and expected.record is not None:
            twin[copy_id] = expected.record
        lets_pass = expected.status in (GrantStatus.GRANTED, GrantStatus.SETTLED)
        is_held_up = step.in_line and not lets_pass


async def check_settle(
    bench: Bench, twin: dict[CopyId, LeaseRecord], entries: list[SettleEntry], now: float, needed: int
) -> None:
    for entry, answer in zip(entries, await bench.store.settle(entries), strict=True):
        expected = decide_settle(
            twin.get(entry.copy_id),
            entry.action,
            now=now,
            lease_id=entry.lease_id,
            seconds=entry.seconds,
            target=entry.target,
            target_copy_id=entry.target_copy_id,
            reason=entry.reason,
            age_seconds_max=entry.age_seconds_max,
            is_overtaken=entry.under is not None and entry.under[1] < needed,
        )
        assert answer.status is expected.status
        assert answer.remaining_seconds == pytest.approx(expected.remaining_seconds, abs=1e-4)
        check_record(answer.record, expected.record)
        if expected.status is SettleStatus.DONE and expected.record is not None:
            twin[entry.copy_id] = expected.record


def check_record(record: LeaseRecord | None, expected: LeaseRecord | None) -> None:
    """Compare records; the last digit of a time may differ by rounding."""
    assert (record is None) == (expected is None)
    if record is None or expected is None:
        return
    for name, value, wanted in zip(LeaseRecord._fields, record, expected, strict=True):
        assert value == (pytest.approx(wanted, abs=1e-4) if isinstance(wanted, float) else wanted), name
