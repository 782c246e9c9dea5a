"""Growth: the rate, the latency and the processor time of a pop and an ack, while one quantity grows.

`make bench-growth` runs this. It prints each point, and writes a JSON file and one plot for each curve. Ratios compare
a point with the first point of its curve, which is measured again at the end of the curve, to show how much the machine
itself varies. The figure that a busy machine disturbs least is the processor time of the proxy.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import growth_load, growth_page
from bench.growth_curves import CURVES, Curve, Scale, SetupTooLongError, Work, World
from bench.growth_load import Measured, StalledError
from bench.systems.run import machine, sync_milliseconds
from support.rabbitmq import RabbitCluster, RabbitSettings
from support.rabbitmq_releases import find_release

BROKERS = ("embedded", "rabbitmq")
QUICK = Scale(share=0.02, largest=1_000, rounds=1, points_max=2)
ROOMY = RabbitSettings(configuration={"vm_memory_high_watermark.absolute": "6GB"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The medians of one point's rounds; the percentiles are those of all rounds together."""

    at: float
    rate: float
    ready_us: float
    waiting_us: float
    broker_us: float
    p50_ms: float
    p99_ms: float
    memory_mib: float


def _percentile(latencies: Sequence[float], percent: int) -> float:
    ordered = sorted(latencies)
    return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _point(work: Work, rounds: int) -> Point:
    """Measure a point. The first round is short and not counted, because it opens the queues."""

    def measured(share: float = 1.0) -> Measured:
        ready, waiting = max(work.ready_min, int(share * work.ready)), max(10, int(share * work.waiting))
        return asyncio.run(growth_load.measure(work.target, ready=ready, waiting=waiting, rate=work.rate))

    measured(0.3)
    found = [measured() for _ in range(rounds)]
    latencies = [seconds for one in found for seconds in one.latencies]
    return Point(
        at=work.at,
        rate=statistics.median(one.rate for one in found),
        ready_us=statistics.median(one.ready_us for one in found),
        waiting_us=statistics.median(one.waiting_us for one in found),
        broker_us=statistics.median(one.broker_us for one in found),
        p50_ms=_percentile(latencies, 50),
        p99_ms=_percentile(latencies, 99),
        memory_mib=work.target.memory_bytes() / 2**20,
    )


def _print(point: Point, base: Point, remark: str = "") -> None:
    print(
        f"  {point.at:>11,g} {point.rate:>8,.0f}/s {point.ready_us:>7,.0f} us ({point.ready_us / base.ready_us:.2f}x)"
        f"   broker {point.broker_us:>6,.0f} us"
        f"   waiting {point.waiting_us:>7,.0f} us ({point.waiting_us / base.waiting_us:.2f}x)"
        f"   p50 {point.p50_ms:>6.1f} p99 {point.p99_ms:>6.1f} ms   {point.memory_mib:>7,.0f} MiB {remark}",
        flush=True,
    )


def measure_curve(curve: Curve, world: World, points: Sequence[float]) -> dict[str, Any]:
    """Measure the points of a curve, and print each. A point that takes too long ends the curve."""
    found: list[Point] = []
    again: Point | None = None
    base: Work | None = None
    left_out = ""
    with closing(curve.works(world, list(points))) as works:
        try:
            for work in works:
                base = base or work
                if time.monotonic() > world.scale.ends_at:
                    left_out = "the time of the run was over"
                    break
                found.append(_point(work, world.scale.rounds))
                _print(found[-1], found[0])
                if len(found) > 1 and work.at == points[-1]:
                    again = _point(base, 1)  # while its proxy still lives
                    _print(again, found[0], "again")
        except SetupTooLongError:
            left_out = f"the setup takes over {world.setup_seconds_max} s"
        except StalledError as error:
            left_out = str(error)
    if left_out:
        left_out = f"{points[len(found)]:,g} and more are left out: {left_out}"
        print(f"  {left_out}", flush=True)
    return {
        "points": [asdict(point) for point in found],
        "again": None if again is None else asdict(again),
        "left_out": left_out,
    }


def _conditions(folder: Path, scale: Scale) -> dict[str, Any]:
    arguments = [f"ARGS={' '.join(sys.argv[1:])}"] if sys.argv[1:] else []
    return {
        "command": shlex.join(["make", "bench-growth", *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "sync_ms": sync_milliseconds(folder),
        "load": os.getloadavg()[0],
        "versions": {"Python": platform.python_version(), "RabbitMQ": str(find_release())},
        "rounds": scale.rounds,
    }


def run(
    names: Sequence[str],
    brokers: Sequence[str],
    scale: Scale,
    save: Callable[[dict[str, Any]], None],
    figures: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the curves ``names`` on ``brokers``. Return all figures, and ``save`` them after each curve.

    ``figures``: those of earlier runs. Their other curves stay.
    """
    figures = figures or {"runs": [], "curves": {}}
    with tempfile.TemporaryDirectory(prefix="popgate-growth-") as name:
        folder = Path(name)
        figures["runs"].append(_conditions(folder, scale))
        for broker in brokers:
            with ExitStack() as stack:
                node = None
                if broker == "rabbitmq":
                    node = stack.enter_context(RabbitCluster(folder / "nodes", settings=ROOMY)).nodes[0]
                world = World(folder / broker, node, scale)
                for curve in [curve for curve in CURVES if curve.name in names]:
                    print(f"{broker}: {curve.axis}", flush=True)
                    points = [at for at in curve.points_on(broker) if at <= scale.largest][: scale.points_max]
                    figures["curves"].setdefault(curve.name, {})[broker] = measure_curve(curve, world, points)
                    save(figures)
    return figures


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="two points a curve with few messages, to see that it works"
    )
    parser.add_argument("--rounds", type=int, default=Scale().rounds, help="rounds of each point")
    parser.add_argument("--largest", type=float, default=Scale().largest, help="leave out points beyond this one")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no point after this time")
    parser.add_argument("--only", action="append", choices=[curve.name for curve in CURVES], help="only this curve")
    parser.add_argument("--broker", action="append", choices=BROKERS, help="only this broker")
    parser.add_argument("--json", type=Path, default=Path("growth.json"), help="file for the figures")
    parser.add_argument("--keep", action="store_true", help="keep the other curves that the file has")
    parser.add_argument("--docs", type=Path, help="folder with growth.md: write the figures, plots and tables there")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes
    scale = QUICK if arguments.quick else Scale(rounds=arguments.rounds, largest=arguments.largest, ends_at=ends_at)
    names = arguments.only or [curve.name for curve in CURVES]
    docs: Path | None = arguments.docs
    file: Path = arguments.json if docs is None else docs / "growth.json"

    def save(figures: dict[str, Any]) -> None:
        file.write_text(json.dumps(figures, indent=1) + "\n")

    figures = json.loads(file.read_text()) if arguments.keep else None
    figures = run(names, arguments.broker or BROKERS, scale, save, figures)
    growth_page.write_plots(file.parent, figures)
    if docs is not None:
        growth_page.write(docs)
    print(f"figures in {file}, plots beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
