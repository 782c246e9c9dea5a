"""How a proxy starts and stops when the services below it fail."""

import contextlib
import itertools
import logging
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from popgate import bootstrap, config
from popgate.bootstrap.endings import EXIT_SECONDS
from popgate.bootstrap.turns import Turns
from popgate.bootstrap.workers import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, pause_seconds
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.runtime.background import Background
from popgate.runtime.faults import Faults
from popgate.runtime.logs import KeyValueFormatter
from support.processes import PortBlock

EXIT_SECONDS_MAX = EXIT_SECONDS + 2.0
HANGS = """
import asyncio, sys, time
from popgate.bootstrap.endings import end_in_time, ending_on_signals

async def hang():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    stop = asyncio.Event()
    with ending_on_signals(stop):
        hanging = asyncio.create_task(hang())
        print("ready", flush=True)
        if "fails" in sys.argv:
            end_in_time(stop, code=1)
        await stop.wait()

asyncio.run(main())
"""


async def test_a_store_that_goes_away_while_a_proxy_starts_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(contextlib.AbstractAsyncContextManager[bootstrap.Proxy, None]):
        async def __aenter__(self) -> bootstrap.Proxy:
            raise StateUnavailable("Redis has gone")

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError("it never began")

    def started(*_: object, **__: object) -> Started:
        return Started()

    monkeypatch.setattr(bootstrap, "started", started)
    block = PortBlock()
    options = config.serve_options({"port": str(block.ports[0]), "data_dir": str(tmp_path)}, {}, None)
    with pytest.raises(StartupError, match="Redis has gone"):
        await bootstrap.serve(options)


@pytest.mark.parametrize(
    ("secret", "warnings"), [(None, 0), ("0123456789abcdef" * 2, 0), ("0123456789abcdef" * 2 + "\n0123456789abcdef", 1)]
)
async def test_a_short_secret_is_one_warning_at_the_start(
    secret: str | None, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"data_dir": str(tmp_path / "data")}
    if secret is not None:
        file = tmp_path / "secrets"
        file.touch(0o600)
        file.write_text(secret)
        given["secret_file"] = str(file)
    options = config.serve_options(given, {}, None)
    for is_first in (True, False):
        background, faults = Background(), Faults()
        async with bootstrap.started(options, background, faults, is_first=is_first):
            pass
    said = [record.getMessage() for record in caplog.records if "popgate secrets new FILE" in record.getMessage()]
    assert len(said) == warnings


def test_a_task_that_does_not_end_holds_up_no_exit() -> None:
    with contextlib.ExitStack() as stack:
        commands = ([sys.executable, "-c", HANGS], [sys.executable, "-c", HANGS, "fails"])
        signalled, failed = [stack.enter_context(subprocess.Popen(one, stdout=subprocess.PIPE)) for one in commands]
        for process in (signalled, failed):
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        signalled.send_signal(signal.SIGTERM)
        assert signalled.wait(EXIT_SECONDS_MAX) == 0
        assert failed.wait(EXIT_SECONDS_MAX) == 1
    assert time.monotonic() - began < EXIT_SECONDS_MAX


# ---------------------------------------------------------------- workers


def test_a_worker_that_ends_again_and_again_is_started_ever_later(seed: int) -> None:
    chance = random.Random(seed)
    pauses = [[pause_seconds(quick_ends, chance) for _ in range(100)] for quick_ends in range(100)]
    assert max(pauses[0]) <= PAUSE_SECONDS_MIN
    for sooner, later in itertools.pairwise(pauses[:6]):
        assert max(sooner) <= 2 * min(later)
        assert max(sooner) < max(later)
    assert max(map(max, pauses)) <= PAUSE_SECONDS_MAX
    assert all(len(set(some)) > 50 for some in pauses), "they don't all come back at the same time"


def test_each_line_of_the_log_names_its_worker() -> None:
    record = logging.makeLogRecord({"msg": "something happened", "queue": "q"})
    assert KeyValueFormatter("%(message)s", 2).format(record) == "something happened worker=2 queue='q'"
    assert KeyValueFormatter("%(message)s").format(record) == "something happened queue='q'"


def test_clients_are_left_to_workers_that_have_notably_fewer() -> None:
    turns = Turns(4)

    def report(worker: int, clients: int) -> None:
        turns.worker = worker
        turns.report(clients)

    def should_yield(worker: int) -> bool:
        turns.worker = worker
        return turns.should_yield()

    report(0, 0)
    assert not should_yield(0), "a worker that does not accept is not waited for"
    for worker, clients in enumerate((40, 34, 36, 0)):
        report(worker, clients)
    assert [should_yield(worker) for worker in range(4)] == [True, True, True, False]
    turns.leave(3)
    assert not should_yield(0)
    report(0, 41)
    assert [should_yield(worker) for worker in range(3)] == [True, False, False]
    turns.leave(1)
    assert not should_yield(0)
