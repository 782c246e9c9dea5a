"""Presents an audit: the verdict, a few lines for the terminal, and the report.

Reads only aggregates, which are few, and the first faults.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from popgate_spark.jobs.audit import ACCOUNTS_MAX, AuditFindings
from popgate_spark.jobs.faults import FAULTS
from popgate_spark.jobs.stories import SECOND
from popgate_spark.report.page import Page, key, note, table
from popgate_spark.report.plots import Bar, bars

SHOWN_MAX = 50
"""Maximum faults, and maximum gaps, in the report."""
BAR_KINDS = ("acked", "redelivered", "dead_lettered", "waiting", "leased", "stuck", "other")
GOOD, WARN, BAD = "good", "warn", "bad"


class Account(NamedTuple):
    topic: str
    group: str
    outcome: str
    copies: int
    handed_out: int
    again: int
    unknown_origin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of an audit. `unsure`: faults that gaps of the journal may explain. `missing`: events that the
    journal lacks; `doubled`: events that it has twice."""

    faults: Counter[str]
    unsure: Counter[str]
    missing: int
    doubled: int
    accounts: Sequence[Account]
    hours: str

    @property
    def copies(self) -> int:
        return sum(one.copies for one in self.accounts)

    @property
    def tone(self) -> str:
        if self.faults:
            return BAD
        return WARN if self.unsure or self.missing or self.doubled else GOOD

    @property
    def headline(self) -> str:
        if self.faults:
            return f"FAULTS: {listed(self.faults)}"
        if self.tone == WARN:
            return "CLEAN, as far as the journal shows"
        return "CLEAN: every message is accounted for"

    @property
    def text(self) -> str:
        parts = [f"{self.copies:,} deliveries of {self.hours}."]
        if self.unsure:
            parts.append(f"Not certain, because the journal lacks events of that time: {listed(self.unsure)}.")
        if self.missing:
            parts.append(f"The journal itself lacks {self.missing:,} events.")
        if self.doubled:
            parts.append(f"The journal has {self.doubled:,} events twice: was a file copied?")
        return " ".join(parts)

    def __str__(self) -> str:
        lines = [f"{one.topic}/{one.group}: {one.copies:,} {one.outcome}{_more(one)}" for one in self.accounts]
        return "\n".join([*lines, f"VERDICT {self.headline}", f"  {self.text}"])

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 if there are faults; `strict`: also if they are not certain, or the journal has gaps."""
        return 1 if self.faults or (strict and self.tone != GOOD) else 0


def verdict_of(findings: AuditFindings) -> Verdict:
    """Compute the verdict from a few aggregated rows."""
    faults, unsure = Counter[str](), Counter[str]()
    for row in findings.faults.groupBy("kind", "certain").count().collect():
        (faults if row["certain"] else unsure)[row["kind"]] = row["count"]
    gap = findings.gaps.agg(
        F.sum(F.greatest("missing", F.lit(0))).alias("missing"),
        F.sum(F.greatest(-F.col("missing"), F.lit(0))).alias("twice"),
    ).first()
    rows = findings.accounts.orderBy("topic", "group", F.desc("copies")).limit(ACCOUNTS_MAX).collect()
    return Verdict(
        faults=faults,
        unsure=unsure,
        missing=(gap["missing"] or 0) if gap is not None else 0,
        doubled=(gap["twice"] or 0) if gap is not None else 0,
        accounts=[Account(*(row[name] for name in Account._fields)) for row in rows],
        hours=str(findings.journal.hours),
    )


def report(findings: AuditFindings, verdict: Verdict, faults: DataFrame) -> str:
    """Return the report's HTML. `faults`: the result of `fault_rows`."""
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    page = Page("Was everything delivered?", f"popgate delivery audit of {findings.journal.hours}, made {made}")
    page.verdict(verdict.tone, verdict.headline, verdict.text)
    by_outcome = Counter[str]()
    for one in verdict.accounts:
        by_outcome[one.outcome] += one.copies
    again = sum(one.again for one in verdict.accounts)
    page.cards(
        [
            (f"{verdict.copies:,}", "copies judged, counted for each group"),
            (f"{by_outcome['acked']:,}", "acked"),
            (f"{again:,}", "delivered more than once"),
            (f"{by_outcome['dead_lettered']:,}", "dead-lettered"),
            (f"{by_outcome['waiting'] + by_outcome['leased']:,}", "not yet settled"),
            (f"{verdict.faults.total():,}", "faults"),
        ]
    )
    kinds = [(name, verdict.faults[name], verdict.unsure[name], what) for name, what in FAULTS.items()]
    shown = [row for row in kinds if row[1] or row[2]]
    page.section("Faults", table(("kind", "certain", "not certain", "what it means"), shown), _shown(faults, verdict))
    page.section(
        "Outcomes of the messages",
        key(BAR_KINDS),
        bars("copies by subscription", _bars(verdict.accounts)),
        table(
            ("topic", "group", "outcome", "copies", "deliveries", "more than once", "origin unknown"), verdict.accounts
        ),
        note(
            "Origin unknown: not published through popgate, or before the journal's first hour. Delivered more than"
            " once: the lease had expired or was released, unless a fault says otherwise."
        ),
    )
    page.section("Gaps in the journal", _gaps(findings))
    return page.html()


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def _bars(accounts: Sequence[Account]) -> list[Bar]:
    by_subscription: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in accounts:
        counts = by_subscription[f"{one.topic}/{one.group}"]
        if one.outcome == "acked":
            counts["redelivered"] += one.again
            counts["acked"] += one.copies - one.again
        else:
            counts[one.outcome if one.outcome in BAR_KINDS else "other"] += one.copies
    ranked = sorted(by_subscription.items(), key=lambda one: -one[1].total())
    return [Bar(name, [(kind, float(counts[kind])) for kind in BAR_KINDS]) for name, counts in ranked]


def _shown(faults: DataFrame, verdict: Verdict) -> str:
    total = verdict.faults.total() + verdict.unsure.total()
    if not total:
        return note("None.")
    columns = (
        "kind",
        "certain",
        "topic",
        "group",
        "queue",
        "message_id",
        "copy_id",
        "ordering_key",
        "at",
        "handed_out",
    )
    rows: list[Any] = faults.orderBy(F.desc("certain"), "kind", "at").limit(SHOWN_MAX).select(*columns).collect()
    head = ("kind", "certain", "topic", "group", "queue", "message", "copy", "ordering key", "seen at", "deliveries")
    cells = [
        tuple(f"{value:%m-%d %H:%M:%S}" if isinstance(value, datetime) else _plain(value) for value in row)
        for row in rows
    ]
    more = f" The first {SHOWN_MAX} of {total:,}." if total > SHOWN_MAX else ""
    return table(head, cells) + note(f"All of them are in faults/, and their events in evidence/.{more}")


def _plain(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _gaps(findings: AuditFindings) -> str:
    rows = findings.gaps.orderBy("since").limit(SHOWN_MAX).collect()
    return table(
        ("proxy", "from", "to", "events missing"),
        [(row["proxy"], _moment(row["since"]), _moment(row["until"]), row["missing"]) for row in rows],
    )


def _moment(micros: int) -> str:
    return f"{datetime.fromtimestamp(micros / SECOND, UTC):%Y-%m-%d %H:%M:%S}"


def _more(one: Account) -> str:
    parts: list[str] = []
    if one.again:
        parts.append(f"{one.again:,} of them delivered more than once")
    if one.unknown_origin:
        parts.append(f"{one.unknown_origin:,} of unknown origin")
    return f" ({', '.join(parts)})" if parts else ""
