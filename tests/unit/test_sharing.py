"""Which tests of a shared run stay together, and which are started first."""

from pathlib import Path

import pytest

from support import sharing
from support.sharing import THREE_NODES, group_of, note, noted_seconds, start_order

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/unit/test_sharing.py::test_a[tests/unit/test_x.py::b]", "tests/unit/test_sharing.py"),
        ("tests/spark/test_sink.py::test_a", "spark"),
        ("tests/cluster/test_chaos.py::test_a[on-rabbitmq-3.10]", "on-rabbitmq-3.10"),
        ("tests/cluster/test_replicas.py::test_a", "three-nodes"),
        ("tests/cluster/test_replicas.py::test_a[on-rabbitmq-4.0-x]", "on-rabbitmq-4.0"),
    ],
)
def test_tests_that_share_servers_stay_together(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_the_files_that_share_three_nodes_are_those_that_ask_for_them() -> None:
    asking = {file for file in TESTS.glob("[!u]*/test_*.py") if "(three_nodes:" in file.read_text()}
    assert {f"tests/{file.relative_to(TESTS)}" for file in asking} == THREE_NODES


def test_the_longest_groups_start_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "NOTED", tmp_path / "seconds.txt")
    long, longer, short = "tests/unit/test_b.py::test_x", "tests/unit/test_c.py::test_x", "tests/unit/test_a.py::test_x"
    noted_seconds.cache_clear()
    try:
        note({long: 7.0, longer: 4.0, longer.replace("_x", "_y"): 4.0, short: 1.0})
        assert sorted([short, long, longer], key=start_order) == [longer, long, short]
        assert noted_seconds() == {"tests/unit/test_c.py": 8, "tests/unit/test_b.py": 7}
    finally:
        noted_seconds.cache_clear()


def test_every_noted_group_exists() -> None:
    """After a file is renamed, run `make test ARGS=--note-seconds`, or change the name there as well."""
    files = {f"tests/{file.relative_to(TESTS)}" for file in TESTS.glob("*/test_*.py")}
    others = {group for group in noted_seconds() if group not in files}
    assert {group for group in others if not group.startswith(sharing.OTHER_SERIES)} <= {"spark", "three-nodes"}
