"""The level of the log can change while the process runs."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from popgate.runtime.log_levels import LogLevels


@pytest.fixture(autouse=True)
def _root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def test_a_change_applies_at_once_and_is_told() -> None:
    levels, told = LogLevels("info"), list[int]()
    levels.watch(lambda: told.append(logging.getLogger().level))
    levels.change("debug")
    assert (levels.level, levels.configured, levels.seconds_left) == ("debug", "info", None)
    assert told[1:] == [logging.DEBUG]
    levels.change("debug")
    assert len(told) == 2


async def test_a_change_with_an_end_ends() -> None:
    levels, ended = LogLevels("warning"), asyncio.Event()
    levels.change("debug", 0.05)
    assert levels.seconds_left is not None
    levels.watch(lambda: ended.set() if levels.level == "warning" else None)
    async with asyncio.timeout(5):
        await ended.wait()
    assert logging.getLogger().level == logging.WARNING
    assert levels.seconds_left is None


async def test_a_later_change_replaces_an_earlier_one_and_its_end() -> None:
    levels = LogLevels("info")
    levels.change("debug", 0.01)
    levels.change("error")
    await asyncio.sleep(0.05)
    assert (levels.level, logging.getLogger().level) == ("error", logging.ERROR)


@pytest.mark.parametrize(("before", "after"), [("info", "error"), ("error", "debug"), ("debug", "info")])
async def test_the_change_is_in_the_log_if_one_of_the_levels_shows_it(
    caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    logging.getLogger().setLevel(before.upper())
    LogLevels(before).change(after)
    (record,) = caplog.records
    assert record.getMessage() == "the level of the log has changed"
    assert (record.__dict__["to"], record.__dict__["was"]) == (after, before)
