"""Finds gaps of the journal: each proxy numbers its events, so a missing number is a missing event.

`faults` decides what gaps mean for a verdict. Numbers are counted in buckets, so that ten million of them are neither
sorted nor compared, and so that parts of a journal can be counted separately and added.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

BUCKET = 4_096
"""Numbers per bucket. A gap inside a bucket is located only to the time span of the bucket's events."""


def counted(rows: DataFrame) -> DataFrame:
    """Count the numbers of each proxy, one row per bucket."""
    return (
        rows.select("proxy", F.floor(F.col("journal_seq") / BUCKET).alias("bucket"), "journal_seq", "at")
        .groupBy("proxy", "bucket")
        .agg(
            F.count("*").alias("rows"),
            F.min("journal_seq").alias("low"),
            F.max("journal_seq").alias("high"),
            F.min(F.unix_micros("at")).alias("since"),
            F.max(F.unix_micros("at")).alias("until"),
        )
    )


def added(one: DataFrame, other: DataFrame) -> DataFrame:
    """Add the counts of two parts of a journal; the result is that of `counted` for both."""
    return (
        one.unionByName(other)
        .groupBy("proxy", "bucket")
        .agg(
            F.sum("rows").alias("rows"),
            F.min("low").alias("low"),
            F.max("high").alias("high"),
            F.min("since").alias("since"),
            F.max("until").alias("until"),
        )
    )


def gaps(buckets: DataFrame) -> DataFrame:
    """Return where events are missing, or recorded twice (`missing` is then negative): proxy, since, until, missing."""
    order = Window.partitionBy("proxy").orderBy("bucket")
    placed = buckets.withColumns(
        {
            "before": F.col("low") - F.lag("high").over(order) - 1,
            "before_since": F.lag("until").over(order),
            "inside": F.col("high") - F.col("low") + 1 - F.col("rows"),
        }
    )
    between = placed.where("before > 0").select(
        "proxy",
        F.least("before_since", "since").alias("since"),
        F.greatest("before_since", "since").alias("until"),
        F.col("before").alias("missing"),
    )
    return between.unionByName(
        placed.where("inside <> 0").select("proxy", "since", "until", F.col("inside").alias("missing"))
    )


def ends(buckets: DataFrame) -> DataFrame:
    """Return when each proxy wrote last: proxy, last_at."""
    return buckets.groupBy("proxy").agg(F.max("until").alias("last_at"))
