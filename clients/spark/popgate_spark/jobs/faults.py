"""The rules of the audit: finds what is wrong with a story, and what the journal leaves uncertain.

Each rule states a promise of popgate; what its guarantees allow (a lease that ended, an unanswered request, a delay) is
not a fault. Every fault is one row with its copy: see `FAULTS`.

`certain` is false if the journal lacks events of the time in which an explaining event must have happened.

popgate's tests have rules of their own (`tests/support/audit_rules.py`), because they judge the answers that clients
got, in memory. These rules see only the journal, and judge millions of messages in Spark. Neither imports the other, so
that a mistake is not made in both.
"""

from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from popgate_spark.jobs.stories import FINAL, FOUND, KEY, LEASE_ENDS, MINTED, SECOND, TOLD, among

LOST, STUCK, ACKED_TWICE, CAME_AGAIN, DOUBLED, OUT_OF_ORDER = (
    *("lost", "stuck", "acked_twice", "came_again", "doubled", "out_of_order"),
)
FAULTS = {
    LOST: "published for the group, never ended, although later messages of its queue were delivered long ago",
    STUCK: "delivered, but neither settled nor expired, although its lease should have ended long ago",
    ACKED_TWICE: "acked more than once",
    CAME_AGAIN: "delivered after its story had ended",
    DOUBLED: "delivered while another lease of it lasted",
    OUT_OF_ORDER: "delivered for the first time after a message of its ordering key that was published later",
}
OWN = (ACKED_TWICE, CAME_AGAIN, STUCK)
"""Faults that a single story shows; each has a column with the time at which it is seen."""
KNOWN = "known"
"""The outcome of a story of which the journal records only that it has ended: it was counted when it ended, or it ended
before the journal's first hour."""
COLUMNS = ("kind", *KEY, "queue", "at", "other_copy_id", "certain")
"""Columns of a fault. `at`: when it is seen; `other_copy_id`: the copy that was delivered before it."""
JUDGED = (
    *(*KEY, "outcome", "events", "queue", "key", "visible", "stamp", "published_at", "publisher"),
    *("delivered", "first_delivered_at", "deliverer", "last_at", "ended_at", *OWN, "lease_until", "is_doubtful"),
)
"""Columns of a judged story: only the necessary ones, because there are millions of stories."""
LINE = ("topic", "group", "queue", "key")
"""Columns of a line, whose messages are delivered in order. The column `line` is their hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The limits of the rules, in seconds."""

    horizon_seconds: float = 3_600.0
    """Must exceed any delay after a release: a waiting message counts as lost only after this time."""
    stuck_seconds: float = 43_200.0
    """Age from which a lease is stuck, even if it was extended all the time."""
    grace_seconds: float = 60.0
    """Time after a lease's end within which the end may be recorded."""
    clock_error_seconds: float = 0.1
    """Maximum difference between the clocks of two proxies, and between an event and its record."""
    tail_seconds: float = 300.0
    """Time for which the journal of a killed proxy may lack events: its rotation age."""


def judged(stories: DataFrame, deleted: DataFrame, end: int, rules: Rules) -> DataFrame:
    """Return the columns `JUDGED` of stories.

    `outcome`: acked, dead_lettered, purged, discarded, redriven, deleted; if the story has not ended, leased, stuck or
    waiting at `end`; or KNOWN. For each fault of `OWN` the time at which it is seen, or null. `is_doubtful`: whether
    two of the story's leases may have overlapped.
    """
    of_group = deleted.where("group is not null").withColumnRenamed("deleted_at", "group_deleted_at")
    of_topic = deleted.where("group is null").select("topic", F.col("deleted_at").alias("topic_deleted_at"))
    known = stories.join(F.broadcast(of_group), ["topic", "group"], "left").join(F.broadcast(of_topic), "topic", "left")
    error = _micros(rules.clock_error_seconds)
    again = F.col("last_delivered_at") > F.col("ended_at") + F.when(
        F.col("count") > F.col("acked_count"), F.lit(0)
    ).otherwise(error)
    # A repeated publish whose first attempt had no answer begins a new life, regardless of that attempt's outcome.
    again &= ~(among("discarded") & (F.col("published") > 1))
    # Two deliveries, counted as first and second, with a lease's end between them, did not overlap.
    settled = (
        (F.col("delivered") == 2)
        & (F.bit_count("counts") == 2)
        & (F.col("first_end_at") <= F.col("second_delivered_at") + error)
    )
    return (
        known.withColumn("outcome", _outcome(end, rules))
        .withColumns(
            {
                ACKED_TWICE: F.when(F.col("acked") > 1, F.col("last_at")),
                CAME_AGAIN: F.when(again, F.col("last_delivered_at")),
                STUCK: F.when(F.col("outcome") == STUCK, F.col("held_at")),
                "lease_until": F.when(F.col("outcome") == STUCK, F.col("lease_until")),
                "is_doubtful": (F.col("delivered") > 1) & ~F.coalesce(settled, F.lit(False)),
            }
        )
        .select(*JUDGED)
    )


def _outcome(end: int, rules: Rules) -> Column:
    gone = F.coalesce(F.greatest("group_deleted_at", "topic_deleted_at"), F.lit(0))
    # A proxy that was suspended records the end of an earlier lease late.
    is_later = F.col("held_at") > F.coalesce("last_end_at", F.lit(0))
    is_leased = F.col("held_at").isNotNull() & (is_later | (F.col("count") > F.col("ended_count")))
    # The length of an extension is not always recorded.
    is_known = F.col("lengthened_at").isNull() | (F.col("lengthened_at") < F.col("last_delivered_at"))
    is_over = F.coalesce(is_known & (F.col("lease_until") < end - _micros(rules.grace_seconds)), F.lit(False))
    is_old = F.col("last_delivered_at") < end - _micros(rules.stuck_seconds)
    outcome = F.when(~among(*TOLD, MINTED), KNOWN)
    for name in ("acked", "redriven", "dead_lettered", "purged", "discarded"):
        outcome = outcome.when(among(name), name)
    for name, event in FOUND.items():
        outcome = outcome.when(among(event), name)
    return (
        outcome.when(gone >= F.col("last_at") - _micros(rules.clock_error_seconds), "deleted")
        .when(is_leased & (is_over | is_old), STUCK)
        .when(is_leased, "leased")
        .otherwise("waiting")
    )


def of_stories(stories: DataFrame, frontier: DataFrame, end: int, rules: Rules) -> DataFrame:
    """Return the faults of single `judged` stories, and lost messages. `frontier`: see `frontier_of`."""
    own = (
        _fault(stories.where(F.col(kind).isNotNull()), kind, F.col(kind), until=F.col("lease_until")) for kind in OWN
    )
    return reduce(DataFrame.unionByName, own, _lost(stories, frontier, end, rules))


def frontier_of(stories: DataFrame) -> DataFrame:
    """Return how far each queue was delivered: (topic, group, queue, frontier), the latest `visible` of its delivered
    messages."""
    return (
        stories.where("delivered > 0 and queue is not null and visible is not null")
        .groupBy("topic", "group", "queue")
        .agg(F.max("visible").alias("frontier"))
    )


def _lost(stories: DataFrame, frontier: DataFrame, end: int, rules: Rules) -> DataFrame:
    """Return the messages that wait although their queue was delivered far beyond them and no earlier message of their
    key is leased."""
    horizon = _micros(rules.horizon_seconds)
    since = F.greatest("visible", "last_at")
    waiting = stories.where(
        (F.col("outcome") == "waiting") & among("published", MINTED, "delivered") & (since < end - horizon)
    )
    overtaken = waiting.join(F.broadcast(frontier), ["topic", "group", "queue"]).where(
        F.col("frontier") > since + horizon
    )
    blockers = (
        stories.where(F.col("outcome").isin("leased", STUCK) & F.col("key").isNotNull())
        .groupBy("topic", "group", "queue", "key")
        .agg(F.min("visible").alias("blocked_since"))
    )
    free = overtaken.join(blockers, ["topic", "group", "queue", "key"], "left").where(
        "blocked_since is null or blocked_since > visible"
    )
    return _fault(free, LOST, since)


def doubled(rows: DataFrame, rules: Rules) -> DataFrame:
    """Find deliveries among `told` rows that happened while another lease of the same copy lasted.

    A lease ends when its end is recorded, for its delivery count or a later one, or when its time is over. A lease
    without a time (pulled, or extended by an unknown time) ends with its session, which is not recorded.
    """
    error = _micros(rules.clock_error_seconds)
    event, count = F.col("event"), F.coalesce("count", F.lit(0))
    ends = event.isin(*LEASE_ENDS, *FINAL, *FOUND.values())
    # The end of a lease may be recorded by another proxy, whose clock is ahead.
    moment = F.when(ends, F.col("at") - error).otherwise(F.col("at"))
    before = Window.partitionBy(*KEY).orderBy("moment", ends.desc(), "journal_seq")
    before = before.rowsBetween(Window.unboundedPreceding, -1)
    is_open = event.isin("delivered", "extended")
    seen = rows.withColumns({"moment": moment, "number": count}).withColumns(
        {
            "ended": F.max(F.when(ends, F.col("number"))).over(before),
            "held": F.max(F.when(event == "delivered", F.col("number"))).over(before),
            "until": F.max(F.when(is_open, F.col("at") + F.col("lease"))).over(before),
            "is_unknown": F.coalesce(F.max(is_open & F.col("lease").isNull()).over(before), F.lit(False)),
        }
    )
    overlaps = (
        (event == "delivered")
        & F.col("held").isNotNull()
        & (F.coalesce("ended", F.lit(-1)) < F.col("held"))
        & ~F.col("is_unknown")
        & (F.col("at") < F.col("until") - error)
    )
    found = seen.where(overlaps).groupBy(*KEY).agg(F.min("at").alias("at"), F.max("queue").alias("queue"))
    return _fault(found, DOUBLED, F.col("at"))


def firsts(stories: DataFrame) -> DataFrame:
    """Return first deliveries of messages with an ordering key that were published through popgate without a delay."""
    plain = stories.where(
        "key is not null and published_at is not null and first_delivered_at is not null"
        " and coalesce(visible, stamp) <= stamp"
    )
    return plain.where(~among(MINTED)).select(
        *(*KEY, "queue", "key", "stamp", "published_at", "publisher", "first_delivered_at", "deliverer"),
        F.xxhash64(*LINE).alias("line"),
    )


def disordered(firsts: DataFrame, newest: DataFrame | None) -> DataFrame:
    """Return the lines in which a first delivery may be out of order. They are few, so that for all other lines only
    numbers are sorted."""
    columns = ("line", "first_delivered_at", "stamp", "published_at")
    handed_out = firsts.select(*columns)
    if newest is not None:
        earlier = newest.select(F.xxhash64(*LINE).alias("line"), "newest.*")
        handed_out = handed_out.unionByName(earlier.withColumn("published_at", F.lit(None)).select(*columns))
    order = Window.partitionBy("line").orderBy("first_delivered_at").rowsBetween(Window.unboundedPreceding, -1)
    latest = handed_out.withColumn("latest", F.max("stamp").over(order))
    return latest.where("latest > published_at").select("line").distinct()


def out_of_order(firsts: DataFrame, newest: DataFrame | None, rules: Rules) -> DataFrame:
    """Find first deliveries that came after that of a message whose publish began after theirs was confirmed.

    `newest`: for each key the latest message of earlier hours (`newest_of`).
    """
    error = _micros(rules.clock_error_seconds)
    candidate = F.struct(
        *("stamp", "first_delivered_at", "publisher", "deliverer"), F.col("copy_id").alias("other_copy_id")
    )
    order = Window.partitionBy(*LINE).orderBy("first_delivered_at", "stamp")
    top: Column = F.max(candidate).over(order.rowsBetween(Window.unboundedPreceding, -1))
    judged = firsts.withColumn("top", top)
    if newest is not None:
        judged = judged.join(newest, [*LINE], "left").withColumn("top", F.greatest("top", "newest"))
    other = F.col("top")
    sent = F.when(other["publisher"] == F.col("publisher"), F.lit(0)).otherwise(error)
    taken = F.when(other["deliverer"] == F.col("deliverer"), F.lit(0)).otherwise(error)
    late = (other["stamp"] > F.col("published_at") + sent) & (
        F.col("first_delivered_at") > other["first_delivered_at"] + taken
    )
    found = judged.where(late).withColumn("other_copy_id", other["other_copy_id"])
    return _fault(found, OUT_OF_ORDER, F.col("first_delivered_at"), F.col("other_copy_id"))


def newest_of(firsts: DataFrame) -> DataFrame:
    """Return for each key the delivered message that was published last: what `out_of_order` needs of earlier hours."""
    candidate = F.struct(
        *("stamp", "first_delivered_at", "publisher", "deliverer"), F.col("copy_id").alias("other_copy_id")
    )
    return firsts.groupBy(*LINE).agg(F.max(candidate).alias("newest"))


def doubted(faults: DataFrame, gaps: DataFrame, ends: DataFrame, rules: Rules) -> DataFrame:
    """Mark faults as not certain if they are based on missing events and the journal has a gap at that time."""
    tail = _micros(rules.tail_seconds)
    windows = gaps.select("since", "until").unionByName(
        ends.select(F.col("last_at").alias("since"), (F.col("last_at") + tail).alias("until"))
    )
    horizon = _micros(rules.horizon_seconds)
    absent = F.col("kind").isin(LOST, STUCK, DOUBLED, OUT_OF_ORDER)
    # The missing event should have happened within the horizon after the fault (for a lease: after its end), or, for a
    # delivery too early or too late, before it.
    back, on = F.col("kind").isin(DOUBLED, OUT_OF_ORDER), F.col("kind").isin(LOST, STUCK)
    low = F.when(back, F.col("at") - horizon).otherwise(F.col("at"))
    high = F.when(on, F.greatest("at", "lasts_until") + horizon).otherwise(F.col("at"))
    meets = absent & (F.col("since") <= high) & (F.col("until") >= low)
    unsure = (
        faults.join(F.broadcast(windows), meets, "left_semi")
        .select("kind", *KEY)
        .distinct()
        .withColumn("unsure", F.lit(True))
    )
    return faults.join(unsure, ["kind", *KEY], "left").withColumn("certain", F.col("unsure").isNull()).select(*COLUMNS)


def _fault(
    rows: DataFrame, kind: str, at: Column, other: Column | None = None, until: Column | None = None
) -> DataFrame:
    """Return `COLUMNS` and `lasts_until`: the latest time of the missing event, if that is later than `at`."""
    return rows.select(
        F.lit(kind).alias("kind"),
        *KEY,
        "queue",
        at.alias("at"),
        (F.lit(None).cast("string") if other is None else other).alias("other_copy_id"),
        F.lit(True).alias("certain"),
        (F.lit(None).cast("long") if until is None else until).alias("lasts_until"),
    )


def _micros(seconds: float) -> int:
    return int(seconds * SECOND)
