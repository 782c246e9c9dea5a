"""The contract of the lease store against a plain model, and with concurrent callers."""

import asyncio
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.lease_bench import (
    QUEUE,
    SUBSCRIPTION,
    A,
    B,
    Bench,
    C,
    OpenBench,
    bench,
    grant,
    open_bench,
)
from popgate.domain.lease import (
    GrantAnswer,
    GrantStatus,
    SettleAction,
    SettleAnswer,
    SettleStatus,
)
from popgate.domain.names import CopyId, LeaseId
from popgate.ports.leases import SettleEntry

__all__ = ["bench", "open_bench"]


# ---------------------------------------------------------------- together


async def test_of_concurrent_grants_of_one_copy_exactly_one_succeeds(bench: Bench) -> None:
    answers = await asyncio.gather(*(grant(bench, LeaseId(f"lease-{number}"), A) for number in range(20)))
    granted = [answer for (answer,) in answers if answer.status is GrantStatus.GRANTED]
    assert len(granted) == 1
    assert {answer.record for (answer,) in answers} == {granted[0].record}


class Model:
    """The possible state of each copy, written independently of the domain's tables."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 0
        self.holder: dict[CopyId, LeaseId] = {}
        self.hidden_until: dict[CopyId, float] = {}
        self.state: dict[CopyId, str] = {}
        self.count: dict[CopyId, int] = {}
        self.attempt: list[tuple[CopyId, LeaseId]] = []
        """The leases of the latest pop under the one attempt."""

    def check_claim(self, epoch: int) -> None:
        assert epoch > self.epoch
        self.epoch = epoch

    def check_grant(self, copy_id: CopyId, lease_id: LeaseId, epoch: int, answer: GrantAnswer, seconds: float) -> None:
        if epoch < self.epoch:
            assert answer == (GrantStatus.FENCED, 0.0, None)
            return
        free = self.state.get(copy_id, "free") != "settled" and self.hidden_until.get(copy_id, 0.0) <= self.now
        assert (answer.status is GrantStatus.GRANTED) == free
        if free:
            self.holder[copy_id], self.state[copy_id] = lease_id, "leased"
            self.hidden_until[copy_id] = self.now + seconds
            self.count[copy_id] = self.count.get(copy_id, 0) + 1
            assert answer.record is not None
            assert answer.record.delivery_count == self.count[copy_id]
            assert answer.record.epoch == epoch
            assert answer.remaining_seconds == pytest.approx(seconds, abs=1e-3)

    def live_of_attempt(self) -> list[tuple[CopyId, LeaseId]]:
        return [
            (copy_id, lease_id)
            for copy_id, lease_id in self.attempt
            if self.holder[copy_id] == lease_id
            and self.state[copy_id] == "leased"
            and self.hidden_until[copy_id] > self.now
        ]

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


class Claim(NamedTuple):
    """A claim by another proxy: earlier epochs are fenced."""


class Grant(NamedTuple):
    """A grant. ``claims_ago``: under which claim; 0 is the latest."""

    copy_ids: list[CopyId]
    seconds: float
    attempt_id: str | None
    claims_ago: int


class Settle(NamedTuple):
    """A settlement. ``orders``: copy, how many leases ago its lease id was made, action, seconds."""

    orders: list[tuple[CopyId, int, SettleAction, float]]


class Wait(NamedTuple):
    seconds: float


class Keep(NamedTuple):
    """Record keeping, long before any record is old enough to be removed."""


class Restart(NamedTuple):
    pass


Step = Claim | Grant | Settle | Wait | Keep | Restart
ATTEMPT = "try"
OLD_SECONDS = 1_000_000.0
COPIES = st.sampled_from([A, B, C])
SECONDS = st.sampled_from([0.25, 1.0, 4.0])
ACTIONS = st.sampled_from([SettleAction.ACK, SettleAction.EXTEND, SettleAction.RELEASE, SettleAction.EXPIRE])
ORDERS = st.lists(st.tuples(COPIES, st.integers(0, 4), ACTIONS, SECONDS), min_size=1, max_size=4)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(Claim),
    st.builds(
        Grant,
        st.lists(COPIES, min_size=1, max_size=4),
        SECONDS,
        st.sampled_from([None, ATTEMPT]),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    st.builds(Settle, ORDERS),
    st.builds(Wait, st.sampled_from([0.5, 2.0])),
    st.builds(Keep),
    st.builds(Restart),
)


@given(script=st.lists(STEPS, max_size=30))
def test_no_copy_has_two_live_leases_and_no_settlement_succeeds_falsely(
    open_bench: OpenBench, script: list[Step]
) -> None:
    asyncio.run(play(open_bench, script))


async def play(open_bench: OpenBench, script: list[Step]) -> None:
    model = Model()
    lease_ids = [LeaseId("never-given")]
    with tempfile.TemporaryDirectory() as folder:
        async with open_bench(Path(folder)) as bench:
            model.check_claim(await bench.store.claim(QUEUE))
            for step in script:
                match step:
                    case Claim():
                        model.check_claim(await bench.store.claim(QUEUE))
                    case Grant(copy_ids, seconds, attempt_id, claims_ago):
                        epoch = model.epoch - claims_ago
                        lease_id = LeaseId(f"lease-{len(lease_ids)}")
                        lease_ids.append(lease_id)
                        granted = await grant(
                            bench, lease_id, *copy_ids, epoch=epoch, seconds=seconds, attempt_id=attempt_id
                        )
                        given: list[tuple[CopyId, LeaseId]] = []
                        for copy_id, grant_answer in zip(copy_ids, granted, strict=True):
                            model.check_grant(copy_id, lease_id, epoch, grant_answer, seconds)
                            if grant_answer.status is GrantStatus.GRANTED:
                                given.append((copy_id, lease_id))
                        if given and attempt_id is not None:
                            model.attempt = given
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
                    case Keep():
                        await bench.store.trim(QUEUE, settled_before=OLD_SECONDS, older_than_seconds=OLD_SECONDS)
                        await bench.store.collect(older_than_seconds=OLD_SECONDS)
                    case Restart():
                        await bench.restart()
                leases = await bench.store.find_attempt(SUBSCRIPTION, ATTEMPT)
                assert [(lease.copy_id, lease.record.lease_id) for lease in leases] == model.live_of_attempt()
