"""`make soak`: mixed load on a proxy on the embedded store and on one on RabbitMQ, for two hours by default.

Every 10 s it samples memory, descriptors, threads and latencies of both proxies. At the end it writes the samples as
JSON, and a plot, and decides for each series whether it is flat (`verdict`). Exit code 1: a series grows, or a request
was refused that should not be.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from soak.load import Load
from soak.plot import drawn
from soak.verdict import Finding, judged
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitCluster
from support.rabbitmq_releases import find_release

SECONDS, INTERVAL_SECONDS = 7_200.0, 10.0
SAMPLES_MIN = 8
BYTE = 1 << 20
ROOT = Path(__file__).parents[2]


class Watched:
    """One proxy under load, with its samples."""

    def __init__(self, name: str, proxy: ProxyProcess, seed: int) -> None:
        self.name = name
        self.proxy = proxy
        self.load = Load(proxy.url, seed)
        self.samples: list[dict[str, float]] = []
        self._process = psutil.Process(proxy.pid)

    def sample(self, at: float, machine_cpu_percent: float) -> dict[str, float]:
        """Take a sample at this time, in seconds since the start. The load of the machine, of which the proxies are
        only a part, shows whether latencies are comparable."""
        sample = {
            "at": round(at, 3),
            "memory_bytes": float(self._process.memory_info().rss),
            "descriptors": float(self._process.num_fds()),
            "threads": float(self._process.num_threads()),
            "cpu_percent": self._process.cpu_percent(),
            "machine_cpu_percent": machine_cpu_percent,
        }
        for operation, latencies in self.load.take_latencies().items():
            if latencies:
                ordered = sorted(latencies)
                sample[f"{operation}_p50_seconds"] = ordered[len(ordered) // 2]
                sample[f"{operation}_p99_seconds"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
                sample[f"{operation}s"] = float(len(ordered))
        self.samples.append(sample)
        return sample

    @property
    def findings(self) -> list[Finding]:
        return judged(self.samples)


async def soaked(watched: Sequence[Watched], seconds: float, interval_seconds: float) -> None:
    """Run the load on all proxies for this long, and take the samples."""
    for one in watched:
        await one.load.prepare()
    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(one.load.run(), name=one.name) for one in watched]
        started = time.monotonic()
        while (at := time.monotonic() - started) < seconds:
            await asyncio.sleep(min(interval_seconds, seconds - at))
            now, busy = time.monotonic() - started, psutil.cpu_percent()
            print(f"{now:7.0f} s  " + "   ".join(_line(one, one.sample(now, busy)) for one in watched), flush=True)
        for load in loads:
            load.cancel()


def _line(one: Watched, sample: Mapping[str, float]) -> str:
    latency = sample.get("pop_p99_seconds", 0.0) * 1_000
    return (
        f"{one.name}: {sample['memory_bytes'] / BYTE:.0f} MiB, {sample['descriptors']:.0f} descriptors, "
        f"{sample['threads']:.0f} threads, pop p99 {latency:.1f} ms"
    )


@contextlib.contextmanager
def servers(folder: Path, brokers: Sequence[str], amqp_url: str | None) -> Generator[list[tuple[str, ProxyProcess]]]:
    """Start the proxies, each with its broker. RabbitMQ is started unless there is one at `amqp_url`."""
    with contextlib.ExitStack() as stack:
        started: list[tuple[str, ProxyProcess]] = []
        for broker in brokers:
            flags: list[str] = []
            if broker == "rabbitmq":
                if amqp_url is None:
                    cluster = stack.enter_context(RabbitCluster(folder / "rabbitmq", release=find_release()))
                    amqp_url = cluster.nodes[0].amqp_url()
                flags = ["--amqp-url", amqp_url]
            started.append((broker, stack.enter_context(ProxyProcess(folder / broker, *flags, name=broker))))
        yield started


def report(watched: Sequence[Watched], seed: int, seconds: float) -> dict[str, Any]:
    """Return everything that was measured, and the verdicts."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "seconds": seconds,
        "seed": seed,
        "commit": commit.stdout.strip(),
        "machine": {"cpus": psutil.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
        "python": platform.python_version(),
        "proxies": {
            one.name: {
                "requests": dict(one.load.requests),
                "client_restarts": one.load.restarts,
                "complaints": dict(one.load.complaints),
                "findings": [{**finding._asdict(), "is_flat": finding.is_flat} for finding in one.findings],
                "samples": one.samples,
            }
            for one in watched
        },
    }


def told(watched: Sequence[Watched]) -> bool:
    """Print the verdicts, and return whether everything is flat and nothing was refused."""
    is_good = True
    for one in watched:
        print(f"\n{one.name}: {sum(one.load.requests.values()):,} requests, {one.load.restarts:,} client restarts")
        for finding in one.findings:
            is_good = is_good and finding.is_flat
            print(
                f"  {finding.name:22} median {finding.median:14,.4f}  growth {finding.growth:+14,.4f}  "
                f"at most {finding.growth_max:14,.4f}  {'flat' if finding.is_flat else 'GROWS'}"
            )
        for complaint, count in one.load.complaints.most_common(10):
            is_good = False
            print(f"  {count} times refused: {complaint}")
    return is_good


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="Soak two proxies, and look for growth.")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--broker", choices=("embedded", "rabbitmq"), action="append", help="may be repeated")
    parser.add_argument("--amqp-url", help="a RabbitMQ to use (default: start one)")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="folder for soak.json and soak.svg")
    arguments = parser.parse_args(words)
    interval = min(arguments.interval, arguments.seconds / SAMPLES_MIN)
    print(f"seed {arguments.seed}, {arguments.seconds:.0f} s")
    brokers = arguments.broker or ("embedded", "rabbitmq")
    with (
        tempfile.TemporaryDirectory(prefix="popgate-soak-") as folder,
        servers(Path(folder), brokers, arguments.amqp_url) as started,
    ):
        watched = [Watched(name, proxy, arguments.seed + at) for at, (name, proxy) in enumerate(started)]
        asyncio.run(soaked(watched, arguments.seconds, interval))
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = report(watched, arguments.seed, arguments.seconds)
    (arguments.out / "soak.json").write_text(json.dumps(figures, indent=1) + "\n")
    (arguments.out / "soak.svg").write_text(drawn({one.name: one.samples for one in watched}))
    is_good = told(watched)
    print(f"\n{'flat' if is_good else 'NOT FLAT'}: {arguments.out}/soak.json, {arguments.out}/soak.svg")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
