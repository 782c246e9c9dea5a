"""What the journal itself lacks: each proxy numbers its events, so a number that is missing is an event that is.

Owns the search for gaps; what they mean for a verdict is in `faults`. Numbers are counted in buckets, so that ten
million of them are neither sorted nor compared, and so that two halves of a journal can be counted apart and added.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

BUCKET = 4_096
"""Numbers. A gap inside of a bucket is known to be somewhere in the time of the bucket's events."""


def counted(rows: DataFrame) -> DataFrame:
    """How many of each proxy's numbers are there, a row a bucket."""
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
    """Of two parts of a journal, what `counted` makes of the whole."""
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
    """Where events are missing, or there twice (`missing` is negative then): proxy, since, until, missing."""
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
    """When each proxy wrote for the last time: proxy, last_at."""
    return buckets.groupBy("proxy").agg(F.max("until").alias("last_at"))
