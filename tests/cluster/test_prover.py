"""The prover finds the faults of broken locks, finds none in ours, and fails clearly."""

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from popgate.prover.target import BUILT_IN, OVER_HTTP
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

TESTS = Path(__file__).parents[1]
VHOST = "prover"
TOGETHER = 6
"""Number of proofs that run at a time: they mostly wait."""
TIMEOUT_SECONDS = 240
BROKEN_SECONDS = "120"
"""Maximum seconds of the proof of a broken lock. It ends as soon as the fault is found: usually after 20."""
OWN_SECONDS = "5"
KINDS = ["mutex", "persistent_mutex", "semaphore"]
FORGOTTEN = "forgotten_over_http"


@dataclass(frozen=True)
class Broken:
    """A lock of ``lock_proof.broken`` and the rules that it breaks; with these flags one violation is seen at once."""

    name: str
    rules: Sequence[str]
    flags: Sequence[str]


UNDISTURBED = ["--kind", "mutex", "--fault", "admin"]
"""A mutex has no administrator."""
BROKEN = [
    # The longest first. A client that is told it holds others' locks may be told so after its own release, too.
    Broken("leaking", ["release"], UNDISTURBED),
    Broken("double_slot", ["exclusion"], ["--kind", "persistent_mutex", "--fault", "admin"]),
    # On a busy machine its releases keep the lock's administrator occupied, so that others wait too long first.
    Broken("released_by_name", ["exclusion", "wait"], UNDISTURBED),
    Broken("lost_slot", ["slots"], ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("verified_by_probe", ["verify", "release"], ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("stale_token_accepted", ["verify", "release"], ["--kind", "persistent_mutex", "--fault", "cut"]),
    Broken("renewed_by_acquiring", ["renew"], ["--kind", "mutex", "--fault", "cut"]),
    Broken("starving", ["wait"], [*UNDISTURBED, "--workers", "2"]),
    Broken("no_fencing", ["tokens"], UNDISTURBED),
    Broken("hasty", ["free"], ["--kind", "semaphore", "--fault", "stop", "--workers", "2"]),
]
HTTP_WAYS = {"http": ("mutex", 1), "proxies": ("semaphore", 2)}
"""Ways to our locks over HTTP: the kind of lock, and the number of proxies."""


@dataclass(frozen=True)
class Proof:
    code: int
    out: str
    err: str
    report: Mapping[str, Any]


def prove(folder: Path, implementation: str, *flags: str) -> Proof:
    """Run the command to its end; ``flags`` come last."""
    file = folder / f"{secrets.token_hex(4)}.json"
    done = subprocess.run(
        [*command(implementation), "--report-file", str(file), *flags],
        capture_output=True,
        env=environment(),
        timeout=TIMEOUT_SECONDS,
        check=False,
        text=True,
    )
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return Proof(done.returncode, done.stdout, done.stderr, report)


def command(implementation: str) -> list[str]:
    flags = ["--implementation", implementation, "--workers", "3", "--duration-seconds", BROKEN_SECONDS]
    return popgate_command("prove", "locks", *flags)


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
    return {**own, "PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitNode) -> Iterator[str]:
    """The broker's URL with a heartbeat so short that a paused client soon loses its lock."""
    rabbitmq.add_vhost(VHOST)
    yield f"{rabbitmq.amqp_url(VHOST)}?heartbeat=1"
    rabbitmq.delete_vhost(VHOST)


@pytest.fixture(scope="module")
def http_urls(
    url: str, rabbitmq: RabbitNode, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sequence[str]]:
    """The URLs of two proxies over one broker."""
    folder = tmp_path_factory.mktemp("proxies")
    serve = ["--amqp-url", rabbitmq.amqp_url(VHOST), "--redis-url", redis_server.url(), "--redis-namespace", VHOST]
    with ProxyProcess(folder / "1", *serve) as one, ProxyProcess(folder / "2", *serve) as two:
        yield one.url, two.url


def over_http(urls: Sequence[str]) -> list[str]:
    return [word for url in urls for word in ("--http-url", url)]


Proofs = Mapping[str, Future[Proof]]


@pytest.fixture(scope="module")
def proofs(url: str, http_urls: Sequence[str], seed: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proofs]:
    """Proofs of each broken lock, and of ours, by name. They run in parallel with other tests."""
    folder = tmp_path_factory.mktemp("proofs")
    amqp, own = ["--amqp-url", url], ["--duration-seconds", OWN_SECONDS]
    work = [(broken.name, f"lock_proof.broken:{broken.name}", [*amqp, *broken.flags]) for broken in BROKEN]
    work += [(FORGOTTEN, f"lock_proof.broken:{FORGOTTEN}", [*over_http(http_urls), *UNDISTURBED])]
    work += [(kind, BUILT_IN, [*amqp, "--kind", kind, *own]) for kind in KINDS]
    work += [
        (way, OVER_HTTP, [*over_http(http_urls[:proxies]), "--kind", kind, *own])
        for way, (kind, proxies) in HTTP_WAYS.items()
    ]
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield {
            name: pool.submit(prove, folder, implementation, "--seed", str(seed), *flags)
            for name, implementation, flags in work
        }


# ---------------------------------------------------------------- how it ends by itself, or is ended


@pytest.mark.usefixtures("proofs")
def test_ctrl_c_ends_it_with_a_verdict_on_what_was_seen(url: str, tmp_path: Path) -> None:
    file, errors = tmp_path / "report.json", tmp_path / "errors"
    flags = [
        "--kind",
        "mutex",
        "--duration-seconds",
        "600",
        "--workers",
        "2",
        "--fault",
        "cut",
        "--report-file",
        str(file),
    ]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [*command(BUILT_IN), "--amqp-url", url, *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(),
            text=True,
        ) as process,
    ):
        try:
            wait_until(lambda: b"round 1" in errors.read_bytes(), timeout_seconds=60, what="the first round's end")
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, out
    assert "pass, interrupted: results so far" in out
    report = json.loads(file.read_text())
    assert report["interrupted"]
    assert not report["kinds"][0]["complete"]
    assert "Traceback" not in errors.read_text()


@pytest.mark.usefixtures("proofs")
def test_a_broker_that_is_not_there_is_told_in_a_line() -> None:
    done = subprocess.run(
        popgate_command("prove", "locks", "--workers", "2", "--amqp-url", "amqp://127.0.0.1:1/"),
        capture_output=True,
        env=environment(),
        timeout=TIMEOUT_SECONDS,
        check=False,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("popgate: no connection to the broker: ")
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- what it finds


@pytest.mark.parametrize("broken", [*BROKEN, Broken(FORGOTTEN, ["release"], [])], ids=lambda broken: broken.name)
def test_a_broken_lock_is_found_with_what_shows_it(proofs: Proofs, broken: Broken) -> None:
    proof = proofs[broken.name].result()
    assert proof.code == 1, proof.err + proof.out
    assert proof.report["verdict"] == "violations"
    (kind,) = proof.report["kinds"]
    seen = [rule for rule in broken.rules if rule in kind["violation_counts"]]
    assert seen, proof.out
    assert all(f"VIOLATION of {rule}" in proof.out for rule in seen)
    excerpts = [violation["excerpt"] for violation in kind["violations"] if violation["rule"] in seen]
    assert all(1 <= len(excerpt) <= 4 for excerpt in excerpts)
    assert "Traceback" not in proof.err


@pytest.mark.parametrize("way", [*KINDS, *HTTP_WAYS])
def test_ours_is_disturbed_and_passes(proofs: Proofs, way: str) -> None:
    proof = proofs[way].result()
    assert proof.code == 0, proof.err + proof.out
    (report,) = proof.report["kinds"]
    assert report["verdict"] == "pass"
    assert report["complete"]
    assert report["grants"] >= 5
    assert sum(report["disturbed"].values()) >= 2
    assert report["costs"]["verify"]["round_trips"] == 1
    assert report["costs"]["verify"]["channels"] == 0
    assert "one acquire costs" in proof.out
