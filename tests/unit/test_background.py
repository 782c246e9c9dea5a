"""Background tasks: a failed loop restarts, and no task outlives the end."""

import asyncio

import pytest

from popgate.runtime import background
from popgate.runtime.background import Background

SECONDS_MAX = 10.0


def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_SECONDS", 0.001)


async def test_a_loop_that_fails_begins_again_and_each_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_pause(monkeypatch)
    reported: list[str] = []
    ran_through = asyncio.Event()
    kept = Background(lambda error: reported.append(str(error)))

    async def work() -> None:
        if len(reported) < 3:
            raise ValueError(f"failure {len(reported)}")
        ran_through.set()
        await asyncio.Event().wait()

    kept.keep(work, name="a loop of the test")
    async with asyncio.timeout(SECONDS_MAX):
        await ran_through.wait()
    await kept.stop()
    assert reported == ["failure 0", "failure 1", "failure 2"]
    assert [getattr(record, "task", "") for record in caplog.records] == ["a loop of the test"] * 3


async def test_a_loop_that_always_fails_leaves_the_event_loop_to_others(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    kept = Background(failures.append)

    async def work() -> None:
        await asyncio.sleep(0)  # so that the test always ends
        raise ValueError("always")

    kept.keep(work, name="a loop that always fails")
    for _ in range(100):
        await asyncio.sleep(0)
    await kept.stop()
    assert len(failures) == 1, "it pauses before it begins again"


async def test_the_end_waits_for_what_tasks_still_do_when_they_are_cancelled() -> None:
    kept, has_begun, has_ended = Background(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            has_ended.set()

    kept.spawn(work(), name="it has to tidy up")
    await has_begun.wait()
    await kept.stop()
    assert has_ended.is_set()


async def test_nothing_is_begun_once_the_end_has_come() -> None:
    kept = Background()
    began: list[str] = []

    async def work() -> None:
        began.append("it")

    await kept.stop()
    assert kept.spawn(work(), name="too late") is None
    assert kept.keep(work, name="too late as well") is None
    await asyncio.sleep(0)
    assert began == []
    await kept.stop()
