"""Runs a job as the command line asks for it: Spark around it, its tables and its report into the output folder.

Owns what is written where, and how failures are told. The jobs themselves know neither flags nor files.
"""

import argparse
import json
import sys
from collections.abc import Callable

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from popgate_spark.jobs.audit import Progress, audit, fault_rows
from popgate_spark.jobs.audit_report import report, verdict_of
from popgate_spark.jobs.audit_state import StateUnreadable
from popgate_spark.jobs.faults import Rules
from popgate_spark.jobs.workplace import Workplace
from popgate_spark.journal_reading import JournalUnreadable
from popgate_spark.session import SparkUnavailable, spark_session
from popgate_spark.storage import StorageFailed, first_line, write_text

REPORT = "report.html"
Run = Callable[[SparkSession, argparse.Namespace, Progress], int]


def run(arguments: argparse.Namespace, progress: Progress) -> int:
    """Returns the exit code; what goes wrong is told in a line on standard error."""
    if arguments.since is not None and arguments.until is not None and arguments.since >= arguments.until:
        return _failed("--from must be before --to")
    progress("starting Spark")
    try:
        with spark_session(
            f"popgate {arguments.job}",
            master=arguments.master,
            memory=arguments.memory,
            settings=dict(arguments.conf),
        ) as spark:
            return JOBS[arguments.job](spark, arguments, progress)
    except (JournalUnreadable, StateUnreadable, StorageFailed, SparkUnavailable) as error:
        return _failed(str(error))
    except (PySparkException, Py4JError) as error:
        return _failed(f"Spark could not finish: {first_line(error)}")


def _audited(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    rules = Rules(
        horizon_seconds=arguments.horizon,
        stuck_seconds=arguments.stuck_after,
        clock_error_seconds=arguments.clock_error,
    )
    out: str = arguments.out.rstrip("/")
    with Workplace(spark, out) as work:
        findings = audit(
            spark,
            arguments.journal,
            work,
            since=arguments.since,
            until=arguments.until,
            rules=rules,
            state=arguments.state,
            progress=progress,
        )
        progress("writing the tables and the report")
        verdict = verdict_of(findings)
        rows = work.kept("fault_rows", fault_rows(findings.faults, findings.evidence), files=1)
        _write(rows, f"{out}/faults")
        _write(findings.evidence, f"{out}/evidence")
        _write(findings.accounts, f"{out}/accounts")
        _write(findings.gaps, f"{out}/gaps")
        write_text(spark, f"{out}/{REPORT}", report(findings, verdict, rows))
        told = {
            "verdict": verdict.headline,
            "text": verdict.text,
            "faults": verdict.faults,
            "not_certain": verdict.unsure,
            "journal_events_missing": verdict.missing,
            "end": findings.end.isoformat(),
        }
        write_text(spark, f"{out}/verdict.json", json.dumps(told, indent=2) + "\n")
    sys.stdout.write(f"{verdict}\n  report: {out}/{REPORT}\n")
    return verdict.exit_code(strict=arguments.strict)


def _write(rows: DataFrame, place: str) -> None:
    rows.coalesce(1).write.mode("overwrite").parquet(place)


def _failed(why: str) -> int:
    sys.stderr.write(f"popgate-pipeline: {why}\n")
    return 2


JOBS: dict[str, Run] = {"audit": _audited}
