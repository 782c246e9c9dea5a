"""`make fuzz`: feeds mutated bytes to every parser of external input, an hour over all targets.

A find is kept in ``tests/fuzz/corpus/TARGET``, and every later run begins with it. ``--seed`` repeats a run.
"""

import argparse
import asyncio
import logging
import random
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import NamedTuple

from fuzz.mutating import Mutator
from fuzz.targets import TARGETS, Feed, Target

CORPUS = Path(__file__).with_name("corpus")
SEED_MAX = 2**32
SECONDS = 3_600.0
GROWN_MEBIBYTES_MAX = 96
"""Maximum growth of memory from the first thousand inputs of a target to its end."""
WARM_COUNT = 1_000
TOLD_SECONDS = 60.0


class Find(Exception):
    """An input at which a target failed. ``path``: where it is kept."""

    def __init__(self, target: str, data: bytes, error: Exception) -> None:
        super().__init__(f"{target}: {type(error).__name__}: {error}")
        self.data = data


class Fuzzed(NamedTuple):
    """``grown_mebibytes``: growth of the process after its first thousand inputs."""

    inputs: int
    grown_mebibytes: float


def kept(target: Target, corpus: Path = CORPUS) -> list[bytes]:
    """Return earlier finds."""
    return [path.read_bytes() for path in sorted((corpus / target.name).glob("*.bin"))]


async def fuzz(target: Target, folder: Path, *, seed: int, seconds: float, corpus: Path = CORPUS) -> Fuzzed:
    """Try earlier finds, then mutations for that long. Raises: Find."""
    async with target.opened(folder) as feed:
        inputs = [*kept(target, corpus), *target.seeds]
        for data in inputs:
            await _try(target, feed, data)
        mutator, count, warm = Mutator(random.Random(f"{target.name} {seed}"), inputs), 0, 0.0
        begun = told = time.monotonic()
        while time.monotonic() - begun < seconds:
            await _try(target, feed, mutator.next())
            count += 1
            if count == WARM_COUNT:
                warm = _mebibytes()
            if time.monotonic() - told > TOLD_SECONDS:
                told = time.monotonic()
                print(f"{target.name}: {count} inputs, {_mebibytes():.0f} MiB", flush=True)
        return Fuzzed(count, _mebibytes() - warm if warm else 0.0)


async def _try(target: Target, feed: Feed, data: bytes) -> None:
    try:
        await feed(data)
    except Exception as error:
        raise Find(target.name, data, error) from error


def keep(find: Find, target: str, corpus: Path = CORPUS) -> Path:
    """Write the input of a find into the corpus."""
    path = corpus / target / f"{sha1(find.data, usedforsecurity=False).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(find.data)
    return path


def _mebibytes() -> float:
    """Return the memory of this process, on Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / (1 << 20)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="over all targets (default: an hour)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEED_MAX), help="seed of a run to repeat")
    parser.add_argument("--target", choices=TARGETS, action="append", help="fuzz only this target; repeatable")
    asked = parser.parse_args(arguments)
    logging.lastResort = None  # log lines about broken input are no finds
    targets = [TARGETS[name] for name in asked.target or TARGETS]
    print(f"fuzz: seed {asked.seed}, {asked.seconds:g} s, {len(targets)} targets", flush=True)
    failed = False
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="popgate-fuzz-") as folder:
            try:
                seconds = asked.seconds / len(targets)
                fuzzed = asyncio.run(fuzz(target, Path(folder), seed=asked.seed, seconds=seconds))
            except Find as find:
                print(f"FOUND {find}\n  kept as {keep(find, target.name)}", flush=True)
                failed = True
                continue
            grows = fuzzed.grown_mebibytes > GROWN_MEBIBYTES_MAX
            failed |= grows
            print(
                f"{target.name}: {fuzzed.inputs} inputs, nothing found; memory grew by "
                f"{fuzzed.grown_mebibytes:.0f} MiB{' (TOO MUCH)' if grows else ''}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
