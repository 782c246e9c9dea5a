"""`make mutate`: plants slips in a copy of the product, one at a time, and runs the tests that should notice.

Prints for each slip the first test that failed, and how: a time-out on a busy machine proves nothing.
The product itself is never changed. Exits with 1 if fewer than 95 of 100 slips are noticed that can be.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants.slip import Slip
from mutants.slips import SLIPS

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
PARTS = ("proxy", "clients/python")
"""The folders that are copied: what Python imports of the product stands in them."""
NOTICED_SHARE_MIN = 0.95
SECONDS_MAX = 900.0
"""How long the tests of one slip may take: a slip at which they hang is noticed."""
FAILURE_LENGTH_MAX = 200
"""Number of characters that are shown of the test that noticed a slip, and of its error."""


def path_of(slip: Slip) -> Path:
    """Where the file of the slip stands in the project."""
    return Path(slip.file) if slip.file.startswith("clients/") else Path("proxy", "popgate", slip.file)


def planted(slip: Slip, source: str) -> str:
    """The source with the slip. Raises: ValueError where it can't be planted."""
    if source.count(slip.before) != 1:
        raise ValueError(f"{slip.file}: {slip.before!r} stands there {source.count(slip.before)} times")
    return source.replace(slip.before, slip.after)


def noticed_by(slip: Slip, folder: Path) -> str:
    """Run its tests on a copy of the product with the slip: the first that fails, and how; empty if all pass."""
    for part in PARTS:
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / path_of(slip)
    path.write_text(planted(slip, path.read_text()))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(one) for one in (*(folder / part for part in PARTS), TESTS)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-rfE", "-n", "0", "--planted"]
    command += ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    try:
        run = subprocess.run(
            [*command, *(str(TESTS / test) for test in slip.tests)],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"tests that took more than {SECONDS_MAX:.0f} s"
    if run.returncode not in (0, 1):
        raise SystemExit(f"the tests of {slip.file} can't run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    if run.returncode == 0:
        return ""
    failures = (line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next(failures, run.stdout[-200:]).removeprefix("FAILED ").removeprefix("ERROR ")[:FAILURE_LENGTH_MAX]


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
        if not failure:
            missed.append(slip)
        word = "noticed" if failure else "NOT NOTICED"
        shown = slip.before.strip().splitlines()[0][:70]
        seconds = time.monotonic() - begun
        print(f"{number:3} of {len(slips)}: {word} after {seconds:.0f} s: {slip.file}: {shown}", flush=True)
        if failure:
            print(f"    by {failure}", flush=True)
    for slip in missed:
        print(f"\nnot noticed by {', '.join(slip.tests)}: {slip.file}\n-{slip.before}\n+{slip.after}")
    share = 1 - len(missed) / max(1, len(slips))
    explained = sum(bool(slip.unnoticed) for slip in SLIPS)
    print(f"\n{len(slips) - len(missed)} of {len(slips)} slips noticed ({share:.0%}); {explained} more are explained")
    return 0 if share >= NOTICED_SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
