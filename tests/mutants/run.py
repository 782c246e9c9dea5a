"""`make mutate`: plants slips in a copy of the product, one at a time, and runs the tests that should notice.

A failed test notices a slip only if it passes without. Prints that test, and how it failed. The product itself is never
changed. Exits with 1 if fewer than 95 of 100 noticeable slips are noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mutants.slip import Slip
from mutants.slips import SLIPS
from support.rabbitmq_releases import NEWEST

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
PARTS = ("proxy", "clients/python")
"""The folders to copy: those from which Python imports the product."""
NOTICED_SHARE_MIN = 0.95
SECONDS_MAX = 300.0
"""Maximum seconds for the tests of one slip; a slip that makes them hang counts as noticed."""
FAILURE_LENGTH_MAX = 200
"""Maximum number of characters shown of the test that noticed a slip, and of its error."""


def path_of(slip: Slip) -> Path:
    """Return the path of the slip's file in the project."""
    return Path(slip.file) if slip.file.startswith("clients/") else Path("proxy", "popgate", slip.file)


def planted(slip: Slip, source: str) -> str:
    """Return the source with the slip. Raises: ValueError if it can't be planted."""
    if source.count(slip.before) != 1:
        raise ValueError(f"{slip.file}: {slip.before!r} stands there {source.count(slip.before)} times")
    return source.replace(slip.before, slip.after)


def first_failure(tests: Sequence[str], imports: Sequence[Path]) -> str:
    """Run tests on the product in the folders ``imports``; return the first failure, or an empty text if all pass."""
    environment = {
        "RABBITMQ": NEWEST,  # one release is enough
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(one) for one in (*imports, TESTS)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-rfE", "-n", "0", "--planted"]
    command += ["-p", "no:cacheprovider", "-p", "no:schemathesis", *tests]
    try:
        run = subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{tests[0]} - more than {SECONDS_MAX:.0f} s"
    if run.returncode == 0:
        return ""
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if not failures:
        raise SystemExit(f"{' '.join(tests)} can't run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return failures[0].partition(" ")[2]


def noticed_by(slip: Slip, folder: Path) -> str:
    """Plant the slip in a copy of the product below ``folder``, and run its tests; return as ``first_failure``."""
    for part in PARTS:
        shutil.copytree(PROJECT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / path_of(slip)
    path.write_text(planted(slip, path.read_text()))
    return first_failure([f"tests/{test}" for test in slip.tests], [folder / part for part in PARTS])


@cache
def fails_anyway(test: str) -> bool:
    """Tell whether a test fails without any slip, too."""
    return bool(first_failure([test], [PROJECT / part for part in PARTS]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", action="append", help="only slips in files whose path contains this text; repeatable")
    parser.add_argument("--text", default="", help="only slips that replace this text")
    asked = parser.parse_args(arguments)
    slips = [
        slip
        for slip in SLIPS
        if not slip.unnoticed and asked.text in slip.before and any(part in slip.file for part in asked.file or [""])
    ]
    missed: list[Slip] = []
    for number, slip in enumerate(slips, 1):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="popgate-mutant-") as folder:
            failure = noticed_by(slip, Path(folder))
        seconds = time.monotonic() - begun
        if failure and fails_anyway(failure.partition(" - ")[0]):
            failure = ""
        if not failure:
            missed.append(slip)
        word = "noticed" if failure else "NOT NOTICED"
        shown = slip.before.strip().splitlines()[0][:70]
        print(f"{number:3} of {len(slips)}: {word} after {seconds:.0f} s: {slip.file}: {shown}", flush=True)
        if failure:
            print(f"    by {failure[:FAILURE_LENGTH_MAX]}", flush=True)
    for slip in missed:
        print(f"\nnot noticed by {', '.join(slip.tests)}: {slip.file}\n-{slip.before}\n+{slip.after}")
    share = 1 - len(missed) / max(1, len(slips))
    explained = sum(bool(slip.unnoticed) for slip in SLIPS)
    print(f"\n{len(slips) - len(missed)} of {len(slips)} slips noticed ({share:.0%}); {explained} more are explained")
    return 0 if share >= NOTICED_SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
