"""Balance, latency and advice, on journals with known results."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.proxy import ProxyProcess
from support.synthetic_files import write_journal
from support.synthetic_journal import INVISIBILITY_SECONDS, Plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET = Plan(messages=3_000, hours=2.0)
DOCUMENT = Path(__file__).parents[2] / "docs" / "pipeline.md"


def run(*arguments: object) -> int:
    from popgate_spark.cli import main

    return main([*map(str, arguments), "--quiet"])


def rows_of(spark: "SparkSession", place: Path) -> list[Any]:
    return spark.read.parquet(str(place)).collect()


# ---------------------------------------------------------------- balance


def test_balance_names_the_client_that_hangs_and_the_queue_that_is_hot(
    spark: "SparkSession", tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(QUIET, messages=6_000, seed=seed, hung_client=True, hot_queue=True)
    planted = write_journal(tmp_path / "journal", plan)
    assert run("balance", "--journal", tmp_path / "journal", "--out", tmp_path / "out") == 0
    clients = rows_of(spark, tmp_path / "out/clients")
    hanging = {row["client"] for row in clients if row["condition"] == "hangs"}
    # The last client of each group, of which the plan has hung one.
    assert hanging == {planted.hung_client}
    assert {row["queue"] for row in rows_of(spark, tmp_path / "out/hot")} == {planted.hot_queue}
    assert math.isclose(sum(row["share"] for row in clients if row["group"] == "billing"), 1.0)
    said = capsys.readouterr().out
    assert f"HANGS orders/billing {planted.hung_client}" in said
    assert f"HOT orders queue {planted.hot_queue}" in said
    assert "<svg" in (tmp_path / "out/report.html").read_text()


def test_balance_finds_nothing_where_nothing_is_wrong(
    spark: "SparkSession", tmp_path: Path, seed: int, full_run: bool
) -> None:
    for number in range(20 if full_run else 2):
        write_journal(tmp_path / "journal", replace(QUIET, seed=seed + number), f"topic-{number}")
    assert run("balance", "--journal", tmp_path / "journal", "--out", tmp_path / "out") == 0
    assert rows_of(spark, tmp_path / "out/hot") == []
    assert {row["condition"] for row in rows_of(spark, tmp_path / "out/clients")} == {None}
    assert all(row["skew"] < 1.6 for row in rows_of(spark, tmp_path / "out/skews"))


# ---------------------------------------------------------------- latency


def test_latency_measures_what_the_journal_has(
    spark: "SparkSession", tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.sql import functions as F

    write_journal(tmp_path / "journal", replace(QUIET, seed=seed))
    arguments = ("latency", "--journal", tmp_path / "journal", "--out", tmp_path / "out", "--step", 300)
    assert run(*arguments) == 0
    journal = spark.read.parquet(str(tmp_path / "journal"))
    steps = rows_of(spark, tmp_path / "out/steps")
    published = journal.where("event = 'published'").count()
    assert sum(row["came"] for row in steps if row["group"] == "billing") == published
    first = journal.where("event = 'delivered' and delivery_count = 1 and group = 'billing'")
    wait = (F.unix_micros("at") - F.unix_micros("visible_at")) / 1e6
    median = first.agg(F.percentile(wait, F.lit(0.5))).collect()[0][0]
    total = next(row for row in rows_of(spark, tmp_path / "out/totals") if row["group"] == "billing")
    assert math.isclose(total["to_delivery_p50"], median, rel_tol=0.02)
    last = max((row for row in steps if row["group"] == "billing"), key=lambda row: row["since"])
    assert 0 <= last["waiting"] < 40, "nearly all has ended"
    assert "orders/billing: to delivery p50" in capsys.readouterr().out
    # While it is written: the same steps, each told once, but for those that may still get rows.
    assert run(*arguments, "--available-now", "--late", 300) == 0
    live = {(row["group"], row["since"]): row for row in rows_of(spark, tmp_path / "out/live")}
    told = {(row["group"], row["since"]): row for row in steps if (row["group"], row["since"]) in live}
    assert len(live) > 0.8 * len(steps)
    assert all(live[name]["came"] == row["came"] for name, row in told.items())
    assert len(rows_of(spark, tmp_path / "out/live")) == len(live)


# ---------------------------------------------------------------- advice


def test_a_timeout_comes_from_the_tail_with_expired_leases_censored() -> None:
    from popgate_spark.jobs.advice import Bucket, tail

    chance = random.Random(1)
    times = [chance.expovariate(1 / 4.0) for _ in range(200_000)]
    timeout = 30.0
    counts: dict[float, list[int]] = {}
    for time in times:
        border = math.exp(math.ceil(math.log(min(time, timeout)) * 20) / 20)
        counts.setdefault(border, [0, 0])[time > timeout] += 1
    buckets = sorted(Bucket(border, done, unfinished) for border, (done, unfinished) in counts.items())
    found = tail(buckets, 0.999)
    assert found.seconds is not None
    assert math.isclose(found.seconds, -4.0 * math.log(0.001), rel_tol=0.08)
    assert tail(buckets, 0.9999).seconds is None, "more ran out than one in ten thousand"
    assert math.isclose(found.expired_share, math.exp(-30 / 4), rel_tol=0.3)


def test_advice_has_a_reason_for_each_setting_and_says_what_cannot_be_known(
    spark: "SparkSession", tmp_path: Path, seed: int
) -> None:
    write_journal(tmp_path / "journal", replace(QUIET, seed=seed, hung_client=True))
    for quantile, out in (("0.95", "modest"), ("0.999", "strict")):
        assert run("advice", "--journal", tmp_path / "journal", "--out", tmp_path / out, "--quantile", quantile) == 0
    modest, strict = (
        {(row["group"], row["setting"]): row for row in rows_of(spark, tmp_path / f"{out}/advice")}
        for out in ("modest", "strict")
    )
    assert {setting for _, setting in modest} == {"invisibility_seconds", "max_in_flight", "consumers", "queues"}
    timeout = modest["billing", "invisibility_seconds"]
    assert timeout["present"] == INVISIBILITY_SECONDS
    assert timeout["wanted"] < INVISIBILITY_SECONDS, "the client that hangs says nothing about the work"
    assert "Kaplan-Meier" in timeout["reason"]
    unknown = strict["billing", "invisibility_seconds"]  # in the journal nearly 2 % run out
    assert unknown["wanted"] == 2 * INVISIBILITY_SECONDS
    assert "not identifiable" in unknown["reason"]


def test_advice_is_applied_to_the_proxies_after_it_was_shown(
    spark: "SparkSession", tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from popgate_client.client import Client

    write_journal(tmp_path / "journal", replace(QUIET, seed=seed))
    with ProxyProcess(tmp_path / "data") as proxy, Client(proxy.url) as client:
        client.put_topic("orders", queues=8)
        client.put_group("orders", "billing", invisibility_seconds=30.0)
        applied = (
            "advice",
            "--journal",
            tmp_path / "journal",
            "--out",
            tmp_path / "out",
            "--apply",
            "--url",
            proxy.url,
        )
        assert run(*applied, "--yes") == 0
        said = capsys.readouterr().out
        assert "orders/billing: invisibility_seconds 30.0 -> 60" in said
        assert client.get_group("orders", "billing")["policy"]["invisibility_seconds"] == 60.0
        assert run(*applied, "--yes") == 0
        assert "nothing to change" in capsys.readouterr().out
    assert run(*applied, "--yes") == 2
    assert "the proxies rejected a request" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["audit", "--journal", "nowhere"], "there is no journal in nowhere"),
        (["audit", "--journal", "x", "--from", "2026-11-02", "--to", "2026-11-01"], "--from must be before --to"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    spark: "SparkSession", arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_journal_of_another_version_and_a_folder_of_something_else_are_refused(
    spark: "SparkSession", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "journal/date=2026-11-01/hour=00")
    spark.range(3).write.parquet(place)
    assert run("audit", "--journal", tmp_path / "journal") == 2
    assert "is not a file of popgate's journal" in capsys.readouterr().err
    write_journal(tmp_path / "other", replace(QUIET, messages=50, hours=0.5))
    assert run("audit", "--journal", tmp_path / "other", "--from", "2026-12-01", "--to", "2026-12-02") == 2
    assert "it goes from 2026-11-01 00:00 to 2026-11-01 01:00" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["audit"],
        ["frobnicate"],
        ["audit", "--journal", "x", "--from", "yesterday"],
        ["advice", "--journal", "x", "--quantile", "1"],
        ["latency", "--journal", "x", "--step", "0"],
        ["audit", "--journal", "x", "--conf", "memory=1g"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPGATE_JOURNAL", raising=False)
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    assert "popgate-pipeline" in capsys.readouterr().err


def test_a_store_that_spark_has_no_package_for_is_told_with_what_to_add(
    spark: "SparkSession", capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("balance", "--journal", "s3://lake/journal", "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert 'No FileSystem for scheme "s3"; this Spark has no package for this file system: for S3 write s3a://' in told
    assert "--conf spark.jars.packages=org.apache.hadoop:hadoop-aws:3." in told


def test_it_is_submitted_as_its_document_says(tmp_path: Path, spark: "SparkSession") -> None:
    """`spark` is requested only so that this test is skipped without Java, too. It runs as a separate program."""
    write_journal(tmp_path / "journal", replace(QUIET, messages=300, hours=0.5))
    (line,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("spark-submit ")]
    command = line.replace("spark://host:7077", "local[1] --conf spark.sql.shuffle.partitions=1").replace(
        "--journal ...", f"--journal {tmp_path}/journal --out {tmp_path}/out"
    )
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    own |= {"PATH": programs, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(["sh", "-c", command], env=own, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "VERDICT CLEAN: every message is accounted for" in done.stdout
    assert json.loads((tmp_path / "out/verdict.json").read_text())["faults"] == {}
