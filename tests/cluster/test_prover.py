"""The prover finds what is wrong with broken locks, finds nothing wrong with ours, and fails clearly."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.proxy import popgate_command
from support.rabbitmq import RabbitNode

TESTS = Path(__file__).parents[1]
VHOST = "prover"
TOGETHER = 3
"""So many proofs run at a time: they mostly wait."""
TIMEOUT_SECONDS = 120
KINDS = ["mutex", "persistent_mutex", "semaphore"]


@dataclass(frozen=True)
class Broken:
    """A lock of ``proving.broken``, with the rule that it breaks, and the flags with which that is seen at once."""

    name: str
    rule: str
    flags: Sequence[str]


BROKEN = [
    Broken("no_fencing", "tokens", ["--kind", "mutex", "--fault", "cut"]),
    Broken("token_of_the_clock", "tokens", ["--kind", "mutex", "--fault", "cut"]),
    Broken("released_by_name", "exclusion", ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("verified_by_probe", "verify", ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("stale_token_accepted", "verify", ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("lost_slot", "slots", ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("double_slot", "exclusion", ["--kind", "persistent_mutex", "--fault", "admin"]),
    Broken("starving", "wait", ["--kind", "mutex", "--fault", "cut", "--workers", "3"]),
    Broken("leaking", "release", ["--kind", "mutex", "--fault", "kill"]),
]


@dataclass(frozen=True)
class Proof:
    code: int
    out: str
    err: str
    report: Mapping[str, Any]


def prove(folder: Path, url: str, implementation: str, *flags: str) -> Proof:
    """The command to its end; ``flags`` come last."""
    file = folder / f"{implementation}.json"
    done = subprocess.run(
        [*command(url, implementation), "--json", str(file), *flags],
        capture_output=True,
        env=environment(),
        timeout=TIMEOUT_SECONDS,
        check=False,
        text=True,
    )
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return Proof(done.returncode, done.stdout, done.stderr, report)


def command(url: str, implementation: str) -> list[str]:
    return popgate_command("prove", "locks", "--amqp-url", url, "--implementation", implementation, "--duration", "4")


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
    return {**own, "PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitNode) -> Iterator[str]:
    """With a heartbeat so short that who stands still loses its lock soon."""
    rabbitmq.add_vhost(VHOST)
    yield f"{rabbitmq.amqp_url(VHOST)}?heartbeat=1"
    rabbitmq.delete_vhost(VHOST)


@pytest.fixture(scope="module")
def proofs(url: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Proof]:
    """Of each broken lock, and of ours; by name."""
    folder = tmp_path_factory.mktemp("proofs")

    def run(name: str, implementation: str, flags: Sequence[str]) -> tuple[str, Proof]:
        return name, prove(folder, url, implementation, "--seed", str(seed), *flags)

    work = [(broken.name, f"proving.broken:{broken.name}", broken.flags) for broken in BROKEN]
    with ThreadPoolExecutor(TOGETHER) as pool:
        return dict(pool.map(lambda one: run(*one), work))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_lock_is_found_with_what_shows_it(proofs: Mapping[str, Proof], broken: Broken) -> None:
    proof = proofs[broken.name]
    assert proof.code == 1, proof.err + proof.out
    assert proof.report["verdict"] == "violations"
    (kind,) = proof.report["kinds"]
    assert broken.rule in kind["violation_counts"], proof.out
    assert f"VIOLATION of {broken.rule}" in proof.out
    excerpts = [violation["excerpt"] for violation in kind["violations"] if violation["rule"] == broken.rule]
    assert all(1 <= len(excerpt) <= 4 for excerpt in excerpts)
    assert "Traceback" not in proof.err
