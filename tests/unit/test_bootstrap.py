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
from popgate.bootstrap.acceptor import ClientCounts
from popgate.bootstrap.endings import EXIT_SECONDS
from popgate.bootstrap.workers import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, pause_seconds
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.runtime.logs import KeyValueFormatter
from support.processes import PortBlock

EXIT_SECONDS_MAX = EXIT_SECONDS + 2.0
HANGS = """
import asyncio, time
from popgate.bootstrap.endings import ending_on_signals

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

    def started(*_: object) -> Started:
        return Started()

    monkeypatch.setattr(bootstrap, "started", started)
    block = PortBlock()
    options = config.serve_options({"port": str(block.ports[0]), "data_dir": str(tmp_path)}, {}, None)
    with pytest.raises(StartupError, match="Redis has gone"):
        await bootstrap.serve(options)


def test_a_task_that_does_not_end_holds_up_no_exit() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(EXIT_SECONDS_MAX) == 0
        finally:
            process.kill()
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
    client_counts = ClientCounts(4)
    client_counts[0] = 0
    assert client_counts.less_busy_than(0) == {}, "who does not accept is not waited for"
    for worker, count in enumerate((40, 34, 36, 0)):
        client_counts[worker] = count
    assert client_counts.less_busy_than(0) == {3: 0}
    client_counts[0] = 41
    assert client_counts.less_busy_than(0) == {1: 34, 3: 0}
    client_counts.leave(3)
    assert client_counts.less_busy_than(0) == {1: 34}
    assert client_counts.less_busy_than(1) == {}
