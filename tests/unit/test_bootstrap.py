"""How a proxy starts and ends where the parts that it stands on do not behave."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from popgate import bootstrap, config
from popgate.domain.errors import StartupError, StateUnavailable
from support.processes import PortBlock

EXIT_SECONDS_MAX = bootstrap.EXIT_SECONDS + 2.0
HANGS = """
import asyncio, time
from popgate import bootstrap

async def hang():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    stop = asyncio.Event()
    with bootstrap._signals(stop):
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
