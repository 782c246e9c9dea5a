"""Work on request runs once at a time, for a limited time, and its latest result is kept."""

import asyncio

import pytest

from popgate.domain.errors import BrokerUnavailable, Conflict, RetryLater
from popgate.runtime.clocks import ManualClock
from popgate.runtime.single_run import SingleRun

SECONDS_MAX = 30.0


async def test_a_second_run_is_refused_until_the_first_has_ended() -> None:
    clock, gate = ManualClock(), asyncio.Event()

    async def work() -> str:
        await gate.wait()
        clock.advance(2.0)
        return "found"

    doctor = SingleRun("the doctor", work, clock, seconds_max=SECONDS_MAX)
    first = asyncio.create_task(doctor.run())
    await asyncio.sleep(0)
    assert (doctor.is_running, doctor.latest) == (True, None)
    with pytest.raises(Conflict, match="the doctor is running already"):
        await doctor.run()
    gate.set()
    finished = await first
    assert (finished.result, finished.seconds, finished.at) == ("found", 2.0, clock.wall())
    assert (doctor.is_running, doctor.latest) == (False, finished)


async def test_a_run_that_fails_or_hangs_ends_and_leaves_the_former_result() -> None:
    outcomes: list[str | Exception | None] = ["found", BrokerUnavailable("away"), None, "again"]

    async def work() -> str:
        outcome = outcomes.pop(0)
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    doctor = SingleRun("the doctor", work, ManualClock(), seconds_max=0.01)
    former = await doctor.run()
    with pytest.raises(BrokerUnavailable, match="away"):
        await doctor.run()
    with pytest.raises(RetryLater, match=r"did not end within 0\.01 s"):
        await doctor.run()
    assert (doctor.latest, doctor.is_running) == (former, False)
    assert (await doctor.run()).result == "again"
