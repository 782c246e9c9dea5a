"""The audit: checks that every message was delivered once, in order, and ended.

Reads a range of the journal in one pass. With a state folder it reads only the hours that are new since the last run,
and the rows of the stories that were not closed then. Both ways give the same result, with one exception: a message
that is delivered again more than `memory_seconds` after its story ended is found only by a pass that reads both events.

A story is closed when it has ended and had no more events for `memory_seconds`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from popgate_spark.jobs import faults as rules_of
from popgate_spark.jobs import gaps as gaps_of
from popgate_spark.jobs.audit_state import Memory, Remembered, remember, remembered
from popgate_spark.jobs.faults import COLUMNS, FAULTS, Rules
from popgate_spark.jobs.scratch_tables import ScratchTables
from popgate_spark.jobs.stories import KEY, MINTED, SECOND, among, deletions, stories, told
from popgate_spark.journal_reading import Journal, open_journal

Progress = Callable[[str], None]
"""Is called with a description of the next step."""

ACCOUNT = ("topic", "group", "outcome")
ACCOUNTS_MAX = 10_000
"""Maximum rows of the accounts that are reported; there is one per topic, group and outcome."""
MEMORY_SECONDS = 3_600.0


def silent(_: str) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFindings:
    """Scratch tables, which must be read before it is removed."""

    journal: Journal
    end: datetime
    """The end of the journal; lateness is judged at this time."""
    accounts: DataFrame
    """(topic, group, outcome, copies, handed_out, again, unknown_origin)."""
    faults: DataFrame
    """See `faults.COLUMNS`."""
    evidence: DataFrame
    """The journal's rows of all copies with faults."""
    gaps: DataFrame


def audit(
    spark: SparkSession,
    path: str,
    work: ScratchTables,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    rules: Rules | None = None,
    state: str | None = None,
    memory_seconds: float = MEMORY_SECONDS,
    progress: Progress = silent,
) -> AuditFindings:
    """Audit the journal in `path`. With a `state` folder: only its new hours, up to `until`.

    Raises: JournalUnreadable, StateUnreadable, StorageFailed.
    """
    before = remembered(spark, state) if state is not None else None
    journal = open_journal(spark, path, since=since if before is None else before.through, until=until)
    progress(f"{journal.files} files of {journal.hours}")
    run = _Run(work, journal, before, rules or Rules(), progress)
    findings = run.findings()
    if state is not None:
        progress("writing the state")
        remember(spark, state, journal.hours.until, run.memory(memory_seconds))
    return findings


class _Run:
    """One pass over a journal's rows, with the memory of earlier passes."""

    def __init__(
        self, work: ScratchTables, journal: Journal, before: Remembered | None, rules: Rules, progress: Progress
    ) -> None:
        self._work, self._journal, self._rules, self._progress = work, journal, rules, progress
        self._before = before.memory if before is not None else None
        self._begin = int(before.through.timestamp() * SECOND) if before is not None else None
        self._rows = self._with_remembered(told(journal.rows))
        self._buckets = gaps_of.counted(journal.rows)
        self._deleted = deletions(journal.rows)
        if self._before is not None:
            self._buckets = gaps_of.added(self._before.buckets, self._buckets)
            both = self._before.deleted.unionByName(self._deleted)
            self._deleted = both.groupBy("topic", "group").agg(F.max("deleted_at").alias("deleted_at"))

    def findings(self) -> AuditFindings:
        work, rules, before = self._work, self._rules, self._before
        self._progress("looking for gaps in the journal")
        self._buckets = work.kept("buckets", self._buckets, files=1)
        self._deleted = work.kept("deleted", self._deleted, files=1)
        end = _end(self._buckets, self._journal)
        self._progress("building the story of each copy")
        self._stories = work.kept("stories", rules_of.judged(stories(self._rows), self._deleted, end, rules))
        self._progress("judging the stories")
        frontier = rules_of.frontier_of(self._stories)
        if before is not None:
            both = frontier.unionByName(before.frontier)
            frontier = both.groupBy("topic", "group", "queue").agg(F.max("frontier").alias("frontier"))
        self._frontier = work.kept("frontier", frontier, files=1)
        own = work.kept("own", rules_of.of_stories(self._stories, self._frontier, end, rules), files=1)
        self._progress("comparing the order of each key")
        self._firsts = rules_of.firsts(self._stories)
        if self._begin is not None:
            self._firsts = self._firsts.where(F.col("first_delivered_at") >= self._begin)
        newest = before.newest if before is not None else None
        disordered = work.kept("disordered", rules_of.disordered(self._firsts, newest), files=1)
        looked_at = self._firsts.join(disordered, "line", "left_semi")
        self._order = work.kept("order", rules_of.out_of_order(looked_at, newest, rules), files=1)
        self._progress("gathering evidence")
        doubtful = work.kept("doubtful", self._stories.where("is_doubtful").select(*KEY))
        suspects = _subjects(own.unionByName(self._order)).unionByName(doubtful)
        self._suspects = work.kept("suspects", self._rows_of(suspects))
        doubled = rules_of.doubled(self._suspects.join(doubtful, [*KEY], "left_semi"), rules)
        self._shown = work.kept("shown", own.unionByName(doubled), files=1)
        faults = self._shown.unionByName(self._order)
        evidence = work.kept("evidence", _evidence(self._suspects, faults), files=1)
        accounts = _accounts(self._stories)
        if before is not None:
            faults = before.faults.unionByName(faults)
            evidence = before.evidence.unionByName(evidence).dropDuplicates(["proxy", "journal_seq", "event", *KEY])
            accounts = _summed(before.accounts.unionByName(accounts))
        gaps = work.kept("gaps", gaps_of.gaps(self._buckets), files=1)
        certain = rules_of.doubted(faults, gaps, gaps_of.ends(self._buckets), rules)
        return AuditFindings(
            journal=self._journal,
            end=datetime.fromtimestamp(end / SECOND, UTC),
            accounts=work.kept("accounts", accounts, files=1),
            faults=work.kept("faults", certain, files=1),
            evidence=work.kept("all_evidence", evidence, files=1) if before is not None else evidence,
            gaps=gaps,
        )

    def _with_remembered(self, rows: DataFrame) -> DataFrame:
        return rows if self._before is None else rows.unionByName(self._before.rows)

    def _rows_of(self, copies: DataFrame) -> DataFrame:
        """Return the `told` rows of a few copies, without converting the journal's other rows."""
        ids = copies.select("copy_id", F.lit(True).alias("is_meant")).distinct()
        near = self._journal.rows.join(ids, "copy_id", "left").where("is_meant or event = 'redriven'")
        return self._with_remembered(told(near)).join(copies, [*KEY], "left_semi")

    def memory(self, memory_seconds: float) -> Memory:
        """Return the memory for the next run. Call `findings` first."""
        before = self._before
        until = int(self._journal.hours.until.timestamp() * SECOND)
        closed = self._work.kept("closed", _closed(self._stories, until, memory_seconds))
        faults = self._shown.join(closed, [*KEY], "left_semi").unionByName(self._order)
        accounts, evidence = _summed(_accounts(closed)), _evidence(self._suspects, faults)
        newest = rules_of.newest_of(self._firsts)
        if before is not None:
            accounts = _summed(before.accounts.unionByName(accounts))
            evidence = before.evidence.unionByName(evidence)
            faults = before.faults.unionByName(faults)
            both = newest.unionByName(before.newest)
            newest = both.groupBy("topic", "group", "queue", "key").agg(F.max("newest").alias("newest"))
        return Memory(
            rows=self._rows.join(closed, [*KEY], "left_anti"),
            buckets=self._buckets,
            deleted=self._deleted,
            frontier=self._frontier,
            newest=newest,
            faults=faults,
            accounts=accounts,
            evidence=evidence,
        )


def fault_rows(faults: DataFrame, evidence: DataFrame) -> DataFrame:
    """Return faults for readers: with the message's id and key, a timestamp, and the meaning of the kind."""
    named = evidence.groupBy(*KEY).agg(
        F.max("message_id").alias("message_id"),
        F.max("ordering_key").alias("ordering_key"),
        F.count_if(F.col("event") == "delivered").alias("handed_out"),
    )
    what = F.create_map(*(F.lit(word) for pair in FAULTS.items() for word in pair))
    return (
        faults.select(*COLUMNS)
        .join(named, [*KEY], "left")
        .withColumns({"at": F.timestamp_micros("at"), "what": what[F.col("kind")]})
        .select(
            "kind", "certain", *KEY, "queue", "message_id", "ordering_key", "at", "handed_out", "other_copy_id", "what"
        )
    )


def _end(buckets: DataFrame, journal: Journal) -> int:
    row = buckets.agg(F.max("until")).first()
    latest: int | None = row[0] if row is not None else None
    return latest if latest is not None else int(journal.hours.until.timestamp() * SECOND)


def _accounts(of: DataFrame) -> DataFrame:
    told = of.where(F.col("outcome") != rules_of.KNOWN)
    return told.groupBy(*ACCOUNT).agg(
        F.count("*").alias("copies"),
        F.sum("delivered").cast("long").alias("handed_out"),
        F.count_if(F.col("delivered") > 1).alias("again"),
        F.count_if(among("delivered") & ~among("published", MINTED)).alias("unknown_origin"),
    )


def _summed(accounts: DataFrame) -> DataFrame:
    counts = ("copies", "handed_out", "again", "unknown_origin")
    return accounts.groupBy(*ACCOUNT).agg(*(F.sum(name).cast("long").alias(name) for name in counts))


def _closed(of: DataFrame, end: int, memory_seconds: float) -> DataFrame:
    over = F.col("ended_at").isNotNull() | (F.col("outcome") == "deleted")
    return of.where(over & (F.col("last_at") < end - int(memory_seconds * SECOND)))


def _evidence(rows: DataFrame, faults: DataFrame) -> DataFrame:
    """Return the rows of all copies with faults, and of the copies that were delivered before them."""
    return rows.join(_subjects(faults), [*KEY], "left_semi")


def _subjects(faults: DataFrame) -> DataFrame:
    others = faults.where("other_copy_id is not null")
    return faults.select(*KEY).unionByName(others.select("topic", "group", F.col("other_copy_id").alias("copy_id")))
