"""A whole cluster under load, whose parts are killed, paused and cut off at random: every promise is kept.

The short form of `make chaos`. Spark then audits the run by the proxies' journal alone, and must reach the same result.
Spark runs once: a journal does not depend on RabbitMQ's version.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.nemesis import Fault
from chaos.run import run
from chaos.servers import JOURNAL
from support.rabbitmq_releases import RabbitRelease, series_to_test
from support.redis import RedisServer

SECONDS, SECONDS_FULL = 40.0, 600.0
OLDEST_SECONDS = 20.0
"""Seconds of faults on the oldest release of RabbitMQ in a short run: the first of the same faults, of nodes, too. The
releases between it and the newest have the full run only.
"""
HORIZON_SECONDS = 20
"""Seconds; longer than any delay of the load."""
AUDIT_SECONDS_MAX = 300

pytestmark = [pytest.mark.crash, pytest.mark.rabbitmq_versions]


async def test_every_promise_is_kept_whatever_is_done_to_the_parts(
    tmp_path: Path,
    seed: int,
    full_run: bool,
    java: None,
    rabbitmq_release: RabbitRelease,
    rabbitmq_series: str,
    redis_server: RedisServer,
) -> None:
    newest, *others = series_to_test()
    if not full_run and rabbitmq_series in others[:-1]:
        pytest.skip("the newest and the oldest release have it in the short run: make crash")
    is_audited = rabbitmq_series == newest
    seconds = SECONDS_FULL if full_run else SECONDS if is_audited else OLDEST_SECONDS
    without = {Fault.POLICY_DROPS} if is_audited else ()  # the journal does not record what RabbitMQ has dropped
    verdict = await run(tmp_path, seed=seed, seconds=seconds, release=rabbitmq_release, without=without)
    print(f"\n{verdict}")  # noqa: T201 - the result
    assert verdict.is_good, str(verdict)
    operations = verdict.operations
    assert min(operations["published"], operations["leases"], operations["acked"]) > 0
    if not is_audited:
        return
    audit = await asyncio.to_thread(spark_audit, tmp_path)
    print(audit.stdout)  # noqa: T201 - the result
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "VERDICT CLEAN" in audit.stdout


def spark_audit(folder: Path) -> subprocess.CompletedProcess[str]:
    """Return the result of `popgate-pipeline audit` on the run's journal."""
    flags = ["--journal", str(folder / JOURNAL), "--out", str(folder / "report"), "--horizon", str(HORIZON_SECONDS)]
    command = [sys.executable, "-m", "popgate_spark.cli", "audit", *flags, "--master", "local[2]"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=AUDIT_SECONDS_MAX)
