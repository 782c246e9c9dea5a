"""The embedded store for tests, in this process and in others."""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from textwrap import dedent

import popgate
from popgate.adapters.sqlite.database import WAITING_JOBS_MAX, Database
from popgate.runtime.clocks import ManualClock

WAIT_SECONDS = 20.0
ENVIRONMENT = {"PYTHONPATH": str(Path(popgate.__file__).parents[1]), "PATH": os.environ["PATH"]}


@asynccontextmanager
async def opened(
    folder: Path, clock: ManualClock | None = None, *, waiting_jobs_max: int = WAITING_JOBS_MAX
) -> AsyncGenerator[Database]:
    """Open a store in ``folder``."""
    database = Database(folder / "popgate.db", clock or ManualClock(), waiting_jobs_max=waiting_jobs_max)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a separate process until it ends."""
    return subprocess.run(
        [sys.executable, "-c", dedent(script), *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def running_python(script: str, *arguments: object) -> Generator[subprocess.Popen[str]]:
    """Run a script in a separate process, which is killed with SIGKILL at the end; its output is a pipe."""
    with subprocess.Popen(
        [sys.executable, "-c", dedent(script), *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
