"""How file descriptors are divided, and how many this process requests."""

import resource
import subprocess
import sys

import pytest

from popgate.bootstrap.descriptors import within
from popgate.config import serve_options

PROGRAM = "import resource; from popgate.bootstrap.descriptors import raise_limit; print(raise_limit()); "


@pytest.mark.parametrize("limit", [64, 1_024, 20_000, 1 << 20])
def test_clients_never_get_the_descriptors_of_the_broker_and_the_store(limit: int) -> None:
    options = serve_options({"connections_max": "1000000", "parked_pops_max": "1000000"}, {}, None)
    less, peers = within(options, limit)
    assert less.connections_max == limit * 3 // 4
    assert less.parked_pops_max == less.connections_max * 3 // 4
    assert less.connections_max + 2 * peers <= limit
    few = serve_options({"connections_max": "40", "parked_pops_max": "30"}, {}, None)
    assert within(few, limit) == (few, peers)


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = 300, 400
    result = subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", PROGRAM + "print(resource.getrlimit(7))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert resource.RLIMIT_NOFILE == 7
    assert result.stdout.split("\n")[:2] == ["400", "(400, 400)"]
