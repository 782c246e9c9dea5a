"""`make tla`: TLC over Balance.tla, size after size; a table. The last sizes take minutes."""

import sys
import time

from popgate.domain.balance import Handover
from support.processes import ServerMissingError
from tla.checker import Size, check, find_jar

SIZES = [
    # queues, members, deaths, stale
    (2, 2, 1, True),
    (3, 2, 1, False),
    (4, 2, 0, True),
    (2, 3, 0, True),
    (3, 3, 0, False),
    (2, 3, 1, False),
    (3, 3, 0, True),
    (3, 2, 1, True),
]


def main() -> int:
    """How many sizes failed."""
    try:
        jar = find_jar()
    except ServerMissingError as error:
        print(f"popgate: {error}")
        return 1
    failed = 0
    print("| queues x members, handover | states | seconds |", "|---|---|---|", sep="\n")
    for queues, members, deaths, stale in SIZES:
        for handover in Handover:
            size = Size(queues=queues, members=members, handover=handover, deaths=deaths, stale=stale)
            began = time.monotonic()
            outcome = check(jar, size)
            failed += bool(outcome.error)
            print(f"| {size} | {outcome.error or f'{outcome.states:,}'} | {time.monotonic() - began:.0f} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
