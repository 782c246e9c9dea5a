"""Decides which tests of a shared run (-n) stay together on one process, and which are started first.

Tests stay together if they share servers: all of Spark, all on one of the other releases of RabbitMQ, all on its three
nodes, or else those of a file. The longest groups start first, so that no process is left with a long group at the end.
Their times are kept in `seconds.txt` beside this module, which a run with `--note-seconds` writes.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

OTHER_SERIES = "on-rabbitmq-"
"""Prefix in the name of a test that runs on another release than most tests."""
THREE_NODES = frozenset(
    {
        "tests/cluster/test_rabbitmq_faults.py",
        "tests/cluster/test_replicas.py",
        "tests/contract/test_replicas_http.py",
    }
)
"""The files whose tests use the fixture `three_nodes`."""
NOTED = Path(__file__).with_name("seconds.txt")
NOTED_SECONDS_MIN = 5
"""Minimum seconds of a group that is noted; the order of shorter ones does not matter."""


def folder_of(nodeid: str) -> str:
    """Return the folder below tests/ that contains a test."""
    return nodeid.removeprefix("tests/").partition("/")[0]


def group_of(nodeid: str) -> str:
    """Return the name of the group that one process runs."""
    other_series = re.search(f"{OTHER_SERIES}[\\d.]+", nodeid)
    if other_series is not None:
        return other_series[0]
    file = nodeid.partition("::")[0]
    if file in THREE_NODES:
        return "three-nodes"
    return "spark" if folder_of(nodeid) == "spark" else file


@cache
def noted_seconds() -> Mapping[str, int]:
    """Return the noted seconds of each long group."""
    lines = (line.split() for line in NOTED.read_text().splitlines()) if NOTED.exists() else ()
    return {group: int(seconds) for seconds, group in lines}


def start_order(nodeid: str) -> tuple[int, str]:
    """Return the sort key that puts the longest groups first and keeps each group together."""
    group = group_of(nodeid)
    return -noted_seconds().get(group, 0), group


def note(seconds: Mapping[str, float]) -> None:
    """Write the seconds of the long groups, given the seconds of each test."""
    groups: defaultdict[str, float] = defaultdict(float)
    for nodeid, of_test in seconds.items():
        groups[group_of(nodeid)] += of_test
    long = sorted((-round(total), group) for group, total in groups.items() if total >= NOTED_SECONDS_MIN)
    NOTED.write_text("".join(f"{-negative:5} {group}\n" for negative, group in long))


def scheduler(config: Any, log: Any) -> Any:
    """Return the scheduler of pytest-xdist that gives each process whole groups."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # xdist has no types

    class Together(LoadFileScheduling):  # type: ignore[misc]  # as above
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Together(config, log)
