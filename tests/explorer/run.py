"""`make explore`: explores every case; prints a table and each broken promise with a way to it.

``--short``: only the cases of the tests. The largest cases need some GB. ``--releases``: instead, how many releases
large groups need.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from explorer.cases import LONG, SHORT
from explorer.releases import rows
from explorer.verdict import Verdict, judge

HEAD = "| queues x members, handover, next is, members see, from, events | starts | states | steps |"
HEAD_REST = " most interruptions | gaps | seconds |"


def row(verdict: Verdict) -> str:
    size = f"{verdict.starts:,} | {verdict.states:,} | {verdict.steps:,}"
    return f"| {verdict.case} | {size} | {told(verdict.interruptions_most)} | {verdict.gaps} | {verdict.seconds:.1f} |"


def told(most: int | None) -> str:
    return "-" if most is None else str(most)


def summary(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """All kinds of handover together: the table of docs/balance.md."""
    alike: defaultdict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        alike[verdict.case.situation()].append(verdict)
    yield "| members see | from | events | queues x members | cases | states | most interruptions | gaps |"
    yield "|---|---|---|---|---|---|---|---|"
    for (views, start, befalls), some in alike.items():
        sizes = ", ".join(dict.fromkeys(f"{one.case.queues}x{one.case.members}" for one in some))
        states, gaps = sum(one.states for one in some), sum(one.gaps for one in some)
        most = [one.interruptions_most for one in some]
        highest = told(None if None in most else max(one or 0 for one in most))
        yield f"| {views} | {start} | {befalls or '-'} | {sizes} | {len(some)} | {states:,} | {highest} | {gaps:,} |"


def main() -> int:
    """Return how many cases broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="explore only the cases of the tests")
    parser.add_argument("--processes", type=int, default=1, help="number of cases to explore at once (default: 1)")
    parser.add_argument("--releases", action="store_true", help="instead, print how many releases large groups need")
    given = parser.parse_args()
    if given.releases:
        for line in rows():
            print(line, flush=True)
        return 0
    cases = SHORT if given.short else [*SHORT, *LONG]
    began = time.monotonic()
    verdicts: list[Verdict] = []
    print(HEAD + HEAD_REST, "|---|---|---|---|---|---|---|", sep="\n")
    with multiprocessing.Pool(given.processes, maxtasksperchild=1) as pool:
        for verdict in pool.imap(judge, cases):
            verdicts.append(verdict)
            print(row(verdict), flush=True)
            for complaint in verdict.complaints:
                print(f"BROKEN: {complaint}")
    print("", *summary(verdicts), sep="\n")
    broken = sum(bool(verdict.complaints) for verdict in verdicts)
    states = sum(verdict.states for verdict in verdicts)
    print(f"\n{len(cases)} cases, {states:,} states, {time.monotonic() - began:.0f} s: {broken} break a promise")
    return broken


if __name__ == "__main__":
    os.nice(5)
    sys.exit(min(1, main()))
