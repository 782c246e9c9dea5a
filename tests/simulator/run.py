"""`make simulate`: runs seeds one after the other, each a cluster or an embedded proxy under load and a nemesis, then
the audit.

A seed determines everything: two runs of it are identical, callback by callback (``trace``). To study one seed, run
``--world WORLD --first SEED --seeds 1 --verbose``.
"""

import argparse
import logging
import multiprocessing
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from simulator.cluster_run import simulate
from simulator.course import Outcome, quietly
from simulator.embedded_run import simulate_embedded

SEED_MAX = 2**32
TOLD_EVERY = 100
WORLDS: dict[str, Callable[[int], Outcome]] = {"cluster": simulate, "embedded": simulate_embedded}


def _simulated(world: str, seeds: range, worker_count: int) -> Iterator[Outcome]:
    """Yield the outcomes, in order."""
    if worker_count < 2:
        yield from map(WORLDS[world], seeds)
        return
    with multiprocessing.get_context("spawn").Pool(worker_count, initializer=logging.disable) as workers:
        yield from workers.imap(WORLDS[world], seeds, chunksize=4)


def main(flags: Sequence[str]) -> int:
    """Return 0 if every promise was kept in every run."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--world", choices=WORLDS, action="append", default=None, help="run this one (default: all)")
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds (default: 300)")
    parser.add_argument("--first", type=int, default=None, help="first seed (default: random)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of processes (default: one a core)")
    parser.add_argument("--verbose", action="store_true", help="print details of each seed")
    arguments = parser.parse_args(flags)
    first = secrets.randbelow(SEED_MAX) if arguments.first is None else arguments.first
    seeds = range(first, first + arguments.seeds)
    workers = min(arguments.workers, arguments.seeds)
    failed = sum(_run(world, seeds, workers, is_verbose=arguments.verbose) for world in arguments.world or WORLDS)
    return 1 if failed else 0


def _run(world: str, seeds: range, worker_count: int, *, is_verbose: bool) -> int:
    """Run the seeds of one world and report on them; return how many failed."""
    print(f"simulation: {world}, {len(seeds)} seeds from {seeds.start}", flush=True)
    begun = time.monotonic()
    failed = 0
    total: Counter[str] = Counter()
    for number, outcome in enumerate(_simulated(world, seeds, worker_count), 1):
        total.update(outcome.figures)
        total.update(outcome.faults)
        if is_verbose:
            seconds = outcome.virtual_seconds
            print(f"seed {outcome.seed}: trace {outcome.trace:08x}, {outcome.steps} steps, {seconds:.1f} s")
            print(outcome.figures, outcome.faults)
        if outcome.complaint:
            failed += 1
            print(outcome, flush=True)
        if number % TOLD_EVERY == 0:
            print(f"{number} seeds in {time.monotonic() - begun:.0f} s, {failed} failed", flush=True)
    seconds = time.monotonic() - begun
    print(f"{len(seeds)} seeds in {seconds:.1f} s, {len(seeds) * 60 / seconds:.0f} a minute, {failed} failed")
    print(dict(total))
    return failed


if __name__ == "__main__":
    with quietly():
        sys.exit(main(sys.argv[1:]))
