"""Runs a job of the command line: starts Spark, and writes the job's tables and report into the output folder.

Owns what is written where, and how failures are reported. The jobs know neither flags nor files.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from popgate_client.client import Client
from popgate_client.errors import PopgateError
from popgate_client.tokens import token_in
from popgate_spark.jobs.advice import Advice, advise
from popgate_spark.jobs.applying import apply, differences
from popgate_spark.jobs.audit import Progress, audit, fault_rows
from popgate_spark.jobs.audit_report import report, verdict_of
from popgate_spark.jobs.audit_state import StateUnreadable
from popgate_spark.jobs.balance import Balance, balance
from popgate_spark.jobs.faults import Rules
from popgate_spark.jobs.latency import Latency, latency, live, step_for
from popgate_spark.jobs.measure_reports import advice_report, balance_report, latency_report
from popgate_spark.jobs.scratch_tables import ScratchTables
from popgate_spark.journal_reading import HoursEmpty, Journal, JournalUnreadable, journal_stream, open_journal
from popgate_spark.session import SparkUnavailable, spark_session
from popgate_spark.storage import StorageFailed, first_line, write_text

REPORT = "report.html"
COMPLETE_AFTER = timedelta(minutes=10)
"""Time after its end until an hour is complete: proxies collect events for a minute, and disks may be slow."""
LINES_MAX = 100
"""Maximum lines printed per batch of a followed journal."""
Run = Callable[[SparkSession, argparse.Namespace, Progress], int]


def run(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the job and return the exit code; an error is reported in one line on standard error."""
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
    except PopgateError as error:
        return _failed(f"the proxies rejected a request: {error}")
    except (PySparkException, Py4JError) as error:
        return _failed(f"Spark could not finish: {first_line(error)}")


def _audited(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    rules = Rules(
        horizon_seconds=arguments.horizon,
        stuck_seconds=arguments.stuck_after,
        clock_error_seconds=arguments.clock_error,
    )
    out: str = arguments.out.rstrip("/")
    until = arguments.until
    if arguments.state is not None and until is None:  # audited hours are not read again
        until = datetime.now(UTC) - COMPLETE_AFTER
    with ScratchTables(spark, out) as work:
        try:
            findings = audit(
                spark,
                arguments.journal,
                work,
                since=arguments.since,
                until=until,
                rules=rules,
                state=arguments.state,
                progress=progress,
            )
        except HoursEmpty as nothing:
            if arguments.state is None:
                raise
            _line(f"nothing new to audit: {nothing}")
            return 0
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
    sys.stdout.write(f"{verdict}\n  report: {_without_credentials(out)}/{REPORT}\n")
    return verdict.exit_code(strict=arguments.strict)


def _balanced(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    journal, out = _opened(spark, arguments, progress), arguments.out.rstrip("/")
    with ScratchTables(spark, out) as work:
        progress("counting by client, queue and proxy")
        found = balance(journal.rows)
        kept = Balance(**{one.name: work.kept(one.name, getattr(found, one.name), files=1) for one in fields(Balance)})
        for one in fields(Balance):
            _write(getattr(kept, one.name), f"{out}/{one.name}")
        html, said = balance_report(kept, str(journal.hours))
        return _told(spark, out, html, said)


def _timed(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    out: str = arguments.out.rstrip("/")
    if arguments.follow or arguments.available_now:
        return _followed(spark, arguments, progress)
    journal = _opened(spark, arguments, progress)
    step = arguments.step or step_for(journal.hours.until - journal.hours.since)
    with ScratchTables(spark, out) as work:
        progress(f"measuring in steps of {step} s")
        found = latency(journal.rows, step)
        kept = Latency(**{one.name: work.kept(one.name, getattr(found, one.name), files=1) for one in fields(Latency)})
        for one in fields(Latency):
            _write(getattr(kept, one.name), f"{out}/{one.name}")
        html, said = latency_report(kept, str(journal.hours), step)
        return _told(spark, out, html, said)


def _followed(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    """Report live: each step once, when the watermark has passed it; a restart continues at the last step."""
    out, step = arguments.out.rstrip("/"), arguments.step or 60
    open_journal(spark, arguments.journal)  # for its errors

    def tell(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{out}/live/batch={number}")  # a repeat writes the same one
        for row in batch.orderBy("since", "topic", "group").limit(LINES_MAX).collect():
            sys.stdout.write(
                f"{row['since']:%Y-%m-%d %H:%M:%S} {row['topic']}/{row['group']}: came {row['came']:,}, ended"
                f" {row['ended']:,}, to delivery p99 {row['to_delivery_p99'] or 0:.3f} s, to ack p99"
                f" {row['to_ack_p99'] or 0:.3f} s\n"
            )
        sys.stdout.flush()

    rows = journal_stream(spark, arguments.journal)
    writer = live(rows, step, arguments.late).writeStream.foreachBatch(tell)
    writer = writer.option("checkpointLocation", f"{out}/_checkpoint").outputMode("append")
    if arguments.available_now:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{arguments.trigger:g} seconds")
        progress("following the journal; Ctrl-C ends it")
    query = writer.start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return 0


def _advised(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> int:
    journal, out = _opened(spark, arguments, progress), arguments.out.rstrip("/")
    progress("measuring the tails of processing times")
    advice = advise(journal.rows, quantile=arguments.quantile)
    table = [asdict(one) for one in advice]
    schema = "topic string, group string, setting string, present double, wanted double, reason string"
    made: DataFrame = spark.createDataFrame([tuple(one.values()) for one in table], schema)  # pyright: ignore[reportUnknownMemberType]  # pandas without types
    _write(made, f"{out}/advice")
    html, said = advice_report(advice, str(journal.hours))
    code = _told(spark, out, html, said)
    return _applied(advice, arguments) if arguments.apply else code


def _applied(advice: Sequence[Advice], arguments: argparse.Namespace) -> int:
    token = token_in(arguments.token_file) if arguments.token_file else None
    with Client(arguments.url, token=token) as client:
        changes = differences(client, advice, arguments.settings or ["invisibility_seconds"])
        if not changes:
            sys.stdout.write("nothing to change: the proxies have what is advised\n")
            return 0
        sys.stdout.write("".join(f"  {change}\n" for change in changes))
        sys.stdout.flush()
        if not arguments.yes:
            if not sys.stdin.isatty():
                return _failed("nothing was changed: pass --yes to apply this without a question")
            if input(f"change these {len(changes)} settings? [y/N] ").strip().lower() not in ("y", "yes"):
                sys.stdout.write("nothing was changed\n")
                return 0
        apply(client, changes, _line)
    return 0


def _opened(spark: SparkSession, arguments: argparse.Namespace, progress: Progress) -> Journal:
    journal = open_journal(spark, arguments.journal, since=arguments.since, until=arguments.until)
    progress(f"{journal.files} files of {journal.hours}")
    if arguments.topic is None:
        return journal
    return replace(journal, rows=journal.rows.where(F.col("topic") == arguments.topic))


def _told(spark: SparkSession, out: str, html: str, said: str) -> int:
    write_text(spark, f"{out}/{REPORT}", html)
    _line(f"{said}\n  report: {_without_credentials(out)}/{REPORT}")
    return 0


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write(rows: DataFrame, place: str) -> None:
    rows.coalesce(1).write.mode("overwrite").parquet(place)


def _failed(why: str) -> int:
    sys.stderr.write(f"popgate-pipeline: {_without_credentials(why)}\n")
    return 2


def _without_credentials(text: str) -> str:
    """Return `text` without users and passwords in the URLs of journal, output and state."""
    return re.sub(r"//[^/?#\s]*@", "//", text)


JOBS: dict[str, Run] = {"audit": _audited, "balance": _balanced, "latency": _timed, "advice": _advised}
