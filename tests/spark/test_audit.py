"""The audit of journals finds exactly the planted faults."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.synthetic_files import write_journal
from support.synthetic_journal import START, TOPIC, Plan, Planted, Subject

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from popgate_spark.jobs.audit import AuditFindings

SEEDS, SEEDS_IN_CI = 20, 3
FAULTY = Plan(
    messages=4_000,
    hours=3.0,
    lost=5,
    doubled=6,
    acked_twice=4,
    came_again=4,
    reordered=5,
    stuck=4,
    troubles=6,
)
PLANTED = {
    "lost": "lost",
    "doubled": "doubled",
    "acked_twice": "acked_twice",
    "came_again": "came_again",
    "reordered": "out_of_order",
    "stuck": "stuck",
}
"""The kind of fault that the audit must report for each."""


class Told(NamedTuple):
    """The full result of an audit."""

    faults: list[Any]
    accounts: list[Any]
    evidence: list[Any]
    gaps: list[Any]
    end: datetime


def found(findings: "AuditFindings", *, certain: bool = True) -> dict[str, set[tuple[str, Subject]]]:
    """The faults by kind: topic, and group and copy id."""
    by_kind: defaultdict[str, set[tuple[str, Subject]]] = defaultdict(set)
    for row in findings.faults.where(f"certain = {certain}").collect():
        by_kind[row["kind"]].add((row["topic"], (row["group"], row["copy_id"])))
    return dict(by_kind)


def wanted(planted: Mapping[str, Planted]) -> dict[str, set[tuple[str, Subject]]]:
    """Return the faults planted in each topic, in the form of `found`."""
    return {
        kind: {(topic, subject) for topic, one in planted.items() for subject in getattr(one, name)}
        for name, kind in PLANTED.items()
    }


def test_each_planted_fault_is_found_and_nothing_else(
    spark: "SparkSession", tmp_path: Path, full_run: bool, seed: int
) -> None:
    from popgate_spark.jobs.audit import audit
    from popgate_spark.jobs.faults import Rules
    from popgate_spark.jobs.scratch_tables import ScratchTables

    planted = {
        f"topic-{number}": write_journal(tmp_path / "journal", replace(FAULTY, seed=seed + number), f"topic-{number}")
        for number in range(SEEDS if full_run else 2)
    }
    with ScratchTables(spark, str(tmp_path / "out")) as work:
        findings = audit(spark, str(tmp_path / "journal"), work, rules=Rules(horizon_seconds=1_800.0))
        assert found(findings) == wanted(planted)
        assert found(findings, certain=False) == {}


def test_the_audit_knows_each_state_in_which_a_proxy_may_find_a_message_settled() -> None:
    from popgate.domain.lease import SETTLED_STATES
    from popgate_spark.jobs.stories import FOUND

    assert set(FOUND.values()) == {f"found_{state}" for state in SETTLED_STATES}


def test_nothing_is_found_where_nothing_is_wrong(
    spark: "SparkSession", tmp_path: Path, full_run: bool, seed: int
) -> None:
    from popgate_spark.jobs.audit import audit
    from popgate_spark.jobs.audit_report import verdict_of
    from popgate_spark.jobs.faults import Rules
    from popgate_spark.jobs.scratch_tables import ScratchTables

    events = 0
    for number in range(SEEDS if full_run else SEEDS_IN_CI):
        plan = Plan(messages=2_500, hours=2.0, seed=seed + number, hung_client=number % 2 == 1, troubles=6)
        events += write_journal(tmp_path / "journal", plan, f"topic-{number}").events
    with ScratchTables(spark, str(tmp_path / "out")) as work:
        findings = audit(spark, str(tmp_path / "journal"), work, rules=Rules(horizon_seconds=1_200.0))
        verdict = verdict_of(findings)
    assert (verdict.faults, verdict.unsure, verdict.missing, verdict.doubled) == ({}, {}, 0, 0)
    assert verdict.exit_code(strict=True) == 0
    outcomes = {one.outcome for one in verdict.accounts}
    assert {"acked", "dead_lettered", "redriven", "purged", "discarded"} <= outcomes, "the journals have all of it"
    assert sum(one.handed_out for one in verdict.accounts) > events / 3


def test_hour_by_hour_it_finds_the_same_as_in_one_pass(
    spark: "SparkSession", tmp_path: Path, seed: int, full_run: bool
) -> None:
    from popgate_spark.jobs.audit import AuditFindings, audit
    from popgate_spark.jobs.audit_report import verdict_of
    from popgate_spark.jobs.faults import Rules
    from popgate_spark.jobs.scratch_tables import ScratchTables

    journal, state = str(tmp_path / "journal"), str(tmp_path / "state")
    planted = write_journal(tmp_path / "journal", replace(FAULTY, seed=seed, hung_client=True, gap_rows=40))
    rules = Rules(horizon_seconds=1_200.0)

    def told(findings: AuditFindings) -> Told:
        faults: list[Any] = sorted(findings.faults.collect(), key=str)
        evidence = sorted((row["proxy"], row["journal_seq"], row["group"]) for row in findings.evidence.collect())
        gaps: list[Any] = sorted(findings.gaps.collect(), key=str)
        return Told(faults, sorted(verdict_of(findings).accounts), evidence, gaps, findings.end)

    with ScratchTables(spark, str(tmp_path / "out")) as work:
        whole = told(audit(spark, journal, work, rules=rules))
    allowed = {(kind, copy_id) for kind, many in wanted({TOPIC: planted}).items() for _, (_, copy_id) in many}
    hourly: Told | None = None
    for hour in (1, 2, 3) if full_run else (2, 3):
        with ScratchTables(spark, str(tmp_path / "out")) as work:
            until = START + timedelta(hours=hour)
            hourly = told(audit(spark, journal, work, rules=rules, state=state, until=until, memory_seconds=600.0))
        found_so_far = {(row["kind"], row["copy_id"]) for row in hourly.faults if row["certain"]}
        assert found_so_far <= allowed, f"what waits or is leased for hours is no fault after hour {hour}"
    assert hourly == whole
    assert planted.gap_proxy is not None
    kept = spark.read.parquet(f"{state}/through=20261101T03/rows").count()
    assert 0 < kept < planted.events / 4, "only stories that go on are carried over"
    assert [one.name for one in Path(state).iterdir()] == ["through=20261101T03"]


def test_where_the_journal_has_a_gap_what_it_may_explain_is_not_certain(
    spark: "SparkSession", tmp_path: Path, seed: int
) -> None:
    from popgate_spark.jobs.audit import audit
    from popgate_spark.jobs.audit_report import verdict_of
    from popgate_spark.jobs.faults import Rules
    from popgate_spark.jobs.scratch_tables import ScratchTables

    planted = write_journal(tmp_path / "journal", Plan(messages=4_000, hours=2.0, seed=seed, gap_rows=300))
    with ScratchTables(spark, str(tmp_path / "out")) as work:
        findings = audit(spark, str(tmp_path / "journal"), work, rules=Rules(horizon_seconds=900.0))
        verdict = verdict_of(findings)
        proxies = {row["proxy"] for row in findings.gaps.collect()}
    assert proxies == {planted.gap_proxy}
    assert verdict.missing == 300
    assert not verdict.faults
    assert verdict.unsure["stuck"] > 0, "acks that are missing leave leases that nobody ended"
    assert "as far as the journal shows" in verdict.headline
    assert (verdict.exit_code(), verdict.exit_code(strict=True)) == (0, 1)


def test_a_gap_long_after_the_hand_out_makes_a_stuck_message_uncertain_if_its_lease_lasted_until_then(
    spark: "SparkSession",
) -> None:
    from popgate_spark.jobs.faults import Rules, doubted

    hour = 3_600_000_000
    faults = spark.sql(
        "select 'stuck' as kind, 't' as topic, 'g' as group, copy_id, 0 as queue, 0L as at,"
        " cast(null as string) as other_copy_id, true as certain, lasts_until"
        f" from values ('short', {hour // 60}L), ('long', {12 * hour}L) as of(copy_id, lasts_until)"
    )
    gaps = spark.sql(f"select 'p' as proxy, {9 * hour}L as since, {9 * hour}L as until, 1L as missing")
    ends = spark.sql(f"select 'p' as proxy, {20 * hour}L as last_at")
    judged = {row["copy_id"]: row["certain"] for row in doubted(faults, gaps, ends, Rules()).collect()}
    assert judged == {"short": True, "long": False}


def test_the_command_writes_tables_and_a_report_that_needs_nothing_else(
    spark: "SparkSession", tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    from popgate_spark.cli import main

    planted = write_journal(tmp_path / "journal", replace(FAULTY, messages=1_500, seed=seed, reordered=0))
    out = tmp_path / "out"
    code = main(["audit", "--journal", str(tmp_path / "journal"), "--out", str(out), "--horizon", "1200"])
    said = capsys.readouterr()
    assert code == 1
    assert "VERDICT FAULTS" in said.out
    assert "gathering evidence" in said.err
    assert json.loads((out / "verdict.json").read_text())["faults"]["lost"] == len(planted.lost)
    faults = spark.read.parquet(str(out / "faults")).collect()
    assert {row["message_id"] for row in faults if row["kind"] == "lost"} == {f"m-{one}" for _, one in planted.lost}
    events = spark.read.parquet(str(out / "evidence")).where("event = 'acked'")
    twice = {row["copy_id"] for row in events.groupBy("copy_id", "group").count().where("count > 1").collect()}
    assert twice == {copy_id for _, copy_id in planted.acked_twice}
    html = (out / "report.html").read_text()
    assert "<svg" in html
    assert "prefers-color-scheme" in html
    assert "src=" not in html
    assert "http" not in html
    assert not (out / "_work").exists()
