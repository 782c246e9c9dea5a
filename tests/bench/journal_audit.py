"""The audit of journals of 1, 3 and 10 million events, by the command, including Spark's start, on two cores."""

import subprocess
import sys
import time
from pathlib import Path

from bench.report import Report, Row
from support.synthetic_files import write_journal
from support.synthetic_journal import Plan

EVENTS_A_MESSAGE = 5.3
MILLIONS = (1, 3, 10)
SECONDS_MAX, MEMORY = 60.0, "3g"
"""Time limit, and the driver's heap: with the memory of Java and Python outside it, less than 4 GB."""
LINEAR_MAX = 1.3
"""Maximum ratio of the time for ten million to ten times the time for one million."""


def rows(report: Report, folder: Path, scale: float) -> None:
    """Add the rows, and the ratio of the time an event between the longest and the shortest journal."""
    seconds: dict[int, float] = {}
    for millions in MILLIONS:
        place = folder / f"journal-{millions}"
        plan = Plan(
            messages=int(millions * 1e6 * scale / EVENTS_A_MESSAGE),
            hours=max(2.0, 2.4 * millions),
            queues=16,
            keys=20_000,
            clients=8,
            lost=5,
            doubled=6,
            acked_twice=3,
            came_again=4,
            reordered=5,
            stuck=4,
        )
        events = write_journal(place, plan).events
        seconds[millions] = _audited(place, folder / f"audit-{millions}")
        limit = SECONDS_MAX if millions == max(MILLIONS) else None
        report.add(
            Row(
                name=f"audit of {events:,} journal events, start of Spark included",
                value=seconds[millions],
                unit="s",
                target="" if limit is None else f"<= {limit:g} s",
                reached=None if limit is None else seconds[millions] <= limit,
            )
        )
    least, most = min(MILLIONS), max(MILLIONS)
    ratio = seconds[most] / most / (seconds[least] / least)
    report.add(
        Row(
            name=f"audit: seconds an event, {most} million",
            value=seconds[most] / most,
            unit="s/million",
            against=f"{least} million",
            ratio=ratio,
            target=f"<= {LINEAR_MAX}x",
            reached=ratio <= LINEAR_MAX,
        )
    )


def _audited(journal: Path, out: Path) -> float:
    """Return the seconds of the command, including everything that it starts."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "popgate_spark.cli", "audit", "--journal", str(journal), "--out", str(out)]
    command += ["--master", "local[2]", "--memory", MEMORY, "--horizon", "1800", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "VERDICT FAULTS" in done.stdout, done.stderr  # the planted ones
    return time.perf_counter() - began
