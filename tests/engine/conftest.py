"""Worlds for the engine's tests: in memory if possible, with a clock that stands still."""

import gc
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from engine.every_queue import watched
from popgate.adapters.sqlite import channel
from popgate.engine.lease import moves
from popgate.runtime.clocks import ManualClock
from simulator.course import quietly
from support.engines import World, open_world

MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with fast writes, because the tests are about order, not about disks."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="popgate-test-") as name:
        yield Path(name)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    """A topic `t` with one queue, a clock that stands still, and practically no idle limit."""
    async with open_world(folder / "data", clock=ManualClock()) as opened:
        await opened.create("t")
        yield opened


@pytest.fixture
async def nameless(folder: Path) -> AsyncIterator[World]:
    """A world whose messages have no stable ids."""
    async with open_world(folder / "data", clock=ManualClock(), anonymous=True) as opened:
        await opened.create("t")
        yield opened


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses of dead-lettering, which use the machine's clock."""
    monkeypatch.setattr(moves, "RETRY_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def _every_queue(request: pytest.FixtureRequest) -> Generator[None]:
    """Check in each test that popgate forgets no queue that could give messages."""
    if request.path.stem == "test_growth":  # it counts what popgate executes
        yield
        return
    with watched() as faults:
        yield
    assert not faults


@pytest.fixture
def no_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the wait of the embedded broker for more messages, which uses the machine's clock."""
    monkeypatch.setattr(channel, "FETCH_DELAY_SECONDS", 0.0)


@pytest.fixture
def quiet_simulation() -> Generator[None]:
    """Turn popgate's log off while a simulated world runs, and collect its garbage."""
    with quietly():
        yield
    gc.collect()  # here, and not in a test that has nothing to do with it
