"""`make mutate`: plants slips in a copy of the product, one at a time, and runs the tests that should notice.

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

from mutants.slips import SLIPS, Slip

TESTS = Path(__file__).resolve().parents[1]
PRODUCT = TESTS.parent / "proxy"
NOTICED_SHARE_MIN = 0.95
SECONDS_MAX = 900.0
"""How long the tests of one slip may take: a slip at which they hang is noticed."""


def planted(slip: Slip, source: str) -> str:
    """The source with the slip. Raises: ValueError where it can't be planted."""
    if source.count(slip.before) != 1:
        raise ValueError(f"{slip.file}: {slip.before!r} stands there {source.count(slip.before)} times")
    return source.replace(slip.before, slip.after)


def is_noticed(slip: Slip, folder: Path) -> bool:
    """Whether its tests fail on a copy of the product with the slip."""
    product = folder / "proxy"
    shutil.copytree(PRODUCT, product, ignore=shutil.ignore_patterns("__pycache__"))
    path = product / "popgate" / slip.file
    path.write_text(planted(slip, path.read_text()))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(product), str(TESTS))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    try:
        run = subprocess.run(
            [*command, *(str(TESTS / test) for test in slip.tests)],
            cwd=TESTS.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if run.returncode not in (0, 1):
        raise SystemExit(f"the tests of {slip.file} can't run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", help="slips in files whose path contains this text only")
    asked = parser.parse_args(arguments)
    slips = [slip for slip in SLIPS if (asked.file or "") in slip.file and not slip.unnoticed]
    missed: list[Slip] = []
    begun = time.monotonic()
    for number, slip in enumerate(slips, 1):
        with tempfile.TemporaryDirectory(prefix="popgate-mutant-") as folder:
            noticed = is_noticed(slip, Path(folder))
        if not noticed:
            missed.append(slip)
        word = "noticed" if noticed else "NOT NOTICED"
        shown = slip.before.strip().splitlines()[0][:70]
        print(f"{number:3} of {len(slips)}, {time.monotonic() - begun:.0f} s: {word}: {slip.file}: {shown}", flush=True)
    for slip in missed:
        print(f"\nnot noticed by {', '.join(slip.tests)}: {slip.file}\n-{slip.before}\n+{slip.after}")
    share = 1 - len(missed) / max(1, len(slips))
    explained = sum(bool(slip.unnoticed) for slip in SLIPS)
    print(f"\n{len(slips) - len(missed)} of {len(slips)} slips noticed ({share:.0%}); {explained} more are explained")
    return 0 if share >= NOTICED_SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
