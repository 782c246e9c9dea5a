"""Compares popgate with what people use instead, in one run. `make bench-peers` runs this.

Each round drains every system once with each of its batch sizes, in turn, and every other round in the reverse order:
machines vary, so only rates of the same round are divided. Servers are started and ended here; a server or client
library that is missing is skipped.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from bench.systems import latency, page
from bench.systems.drain import find_client
from bench.systems.figures import Figures, Measured
from bench.systems.metering import Job
from bench.systems.starting import Servers, Started
from bench.systems.systems import ON_RABBITMQ, PLAIN, SYSTEMS, System
from support.processes import ServerMissingError

ROUNDS, QUICK_SCALE = 5, 0.05
CLIENTS = 8
TOTAL_MIN = 300
"""Minimum number of messages of a drain: more than a batch for each client."""
DRAIN_TIMEOUT_SECONDS = 300
TESTS = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}


class Run:
    """One run of ``systems``, whose servers are started in ``folder``."""

    def __init__(self, folder: Path, stack: ExitStack, figures: Figures, scale: float) -> None:
        self._servers = Servers(folder, stack)
        self._figures = figures
        self._scale = scale
        self._started: dict[str, Started] = {}

    def start(self, systems: list[System]) -> list[System]:
        """Start the servers. Return the systems that can be measured; the others are skipped with a line."""
        found: list[System] = []
        for system in systems:
            missing = [name for name in system.modules if find_spec(name) is None]
            try:
                if missing:
                    raise ServerMissingError(f"the client library {missing[0]} is not installed")
                self._started[system.key] = self._servers.start(system.server)
                found.append(system)
            except ServerMissingError as error:
                self._figures.skipped.append(f"{system.name}: {error}")
                print(f"skipped: {self._figures.skipped[-1]}", flush=True)
        self._figures.versions = dict(self._servers.versions)
        return found

    def measure_round(self, number: int, systems: list[System]) -> None:
        """Drain each system once with each batch size."""
        for system in systems if number % 2 else systems[::-1]:
            for batch in system.totals:
                self._drain(number, system, batch)

    def _drain(self, number: int, system: System, batch: int) -> None:
        started = self._started[system.key]
        job = Job(
            client=system.client,
            port=started.port,
            total=max(TOTAL_MIN, int(self._scale * system.totals[batch])),
            batch=batch,
            clients=CLIENTS,
            pids=started.pids,
            options=started.options,
        )
        asyncio.run(find_client(job.client).fill(job))
        done = subprocess.run(
            [sys.executable, "-m", "bench.systems.drain", job.as_json()],
            check=False,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=DRAIN_TIMEOUT_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{system.name}, batches of {batch}: {done.stderr}")
        self._figures.drains.append(Measured(round=number, system=system.key, batch=batch, **json.loads(done.stdout)))

    def measure_latency(self, number: int) -> None:
        """Measure both ways at a steady rate; they take turns to go first."""
        amqp_url = self._servers.node.amqp_url()
        wheres = {latency.PLAIN: amqp_url, latency.POPGATE: str(self._started[ON_RABBITMQ].port)}
        ways = list(wheres) if number % 2 else list(wheres)[::-1]
        seconds = max(1.0, self._scale * latency.SECONDS)
        self._figures.latencies.append(
            {way: latency.measure(way, wheres[way], amqp_url, seconds, ENVIRONMENT) for way in ways}
        )


def sync_milliseconds(folder: Path) -> float:
    """Return the median time of a synced write of 4 KiB in a folder."""
    times: list[float] = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def machine() -> str:
    """Return a description of the machine."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB of memory, Linux {platform.release().split('-')[0]}"


def measure(systems: list[System], rounds: int, scale: float) -> Figures:
    """Measure all rounds, with a printed line for each."""
    command = shlex.join(["make", "bench-peers", *([f"ARGS={' '.join(sys.argv[1:])}"] if sys.argv[1:] else [])])
    with tempfile.TemporaryDirectory(prefix="popgate-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        figures = Figures(
            machine=machine(),
            command=command,
            date=datetime.now(UTC).date().isoformat(),
            sync_ms=sync_milliseconds(folder),
            load=os.getloadavg()[0],
        )
        run = Run(folder, stack, figures, scale)
        found = run.start(systems)
        keys = {system.key for system in found}
        for number in range(1, rounds + 1):
            began = time.monotonic()
            run.measure_round(number, found)
            if keys >= {PLAIN, ON_RABBITMQ}:
                run.measure_latency(number)
            print(f"round {number} of {rounds}: {time.monotonic() - began:.0f} s", flush=True)
    return figures


def print_tables(figures: Figures) -> None:
    """Print the tables of the page."""
    for name, text in page.tables(figures).items():
        print(f"\n{name}\n{text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of rounds (default {ROUNDS})")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts (default 1)")
    parser.add_argument("--quick", action="store_true", help="one short round, which shows that everything works")
    keys = [system.key for system in SYSTEMS]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="SYSTEM", help=", ".join(keys))
    parser.add_argument("--json", type=Path, default=Path("peers.json"), help="file for the figures")
    parser.add_argument("--docs", type=Path, help="folder whose peers.json, peers.md and peers.svg are written anew")
    options = parser.parse_args(arguments)
    rounds, scale = (1, QUICK_SCALE) if options.quick else (options.rounds, options.scale)
    file = options.json if options.docs is None else options.docs / "peers.json"
    measure([system for system in SYSTEMS if system.key in options.only], rounds, scale).write(file)
    figures = Figures.read(file)
    print_tables(figures)
    if options.docs is not None:
        page.write(options.docs)
    print(f"\nfigures in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
