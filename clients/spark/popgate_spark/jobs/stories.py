"""What became of each copy in each group: the journal's rows, told as one story a (topic, group, copy).

Theory of operation. A row of the journal is about one copy in one group, but `published` names all groups of its topic
and `redriven` begins the story of another copy; `told` makes a row of each. One hash aggregation then makes a story: it
keeps counts and times only, numbers all of them, so that Spark needs neither to sort nor to remember texts. What can't
be told from those (whether one of many hand-outs overlapped the one before) is looked up again in the rows of the few
stories that leave it open: see `faults`.

Times are microseconds since 1970, by the clock of whoever wrote the row.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MINTED = "minted"
"""A copy that a redrive has made: its story begins here, as others begin with `published`."""
TOLD = (
    *("published", "delivered", "acked", "released", "extended", "expired", "rejected", "dead_lettered", "redriven"),
    *("purged", "discarded"),
)
"""Events that belong to a story."""
FINAL = ("acked", "dead_lettered", "purged", "discarded", "redriven")
"""With one of these a story ends. A dead letter's own ends when it is redriven or purged."""
LEASE_ENDS = ("released", "expired", "rejected")
FOUND = {"acked": "found_acked", "dead_lettered": "found_dead", "discarded": "found_discarded"}
"""`found_settled` by its detail: how a story has ended of which that was not told, or was told before."""
FOUND_SETTLED = "found_settled"
KEY = ("topic", "group", "copy_id")
SECOND = 1_000_000
COUNT_BITS = 62
"""Delivery counts from here on share a bit."""


def told(rows: DataFrame) -> DataFrame:
    """The journal's rows, one for each group that they are about; only what stories are made of."""
    event = F.col("event")
    ours = event.isin(*TOLD, FOUND_SETTLED) & F.col("copy_id").isNotNull() & F.col("topic").isNotNull()
    narrow = rows.where(ours).select(
        F.unix_micros("at").alias("at"),
        F.when(event == FOUND_SETTLED, F.concat(F.lit("found_"), "detail")).otherwise(event).alias("event"),
        "topic",
        "group",
        "queue",
        "copy_id",
        "message_id",
        "ordering_key",
        F.col("delivery_count").alias("count"),
        "client",
        "proxy",
        F.unix_micros("published_at").alias("stamp"),
        F.unix_micros("visible_at").alias("visible"),
        (F.col("invisibility_seconds") * SECOND).cast("long").alias("lease"),
        F.when(F.col("event") == "published", F.split("groups", ",")).alias("groups"),
        "new_copy_id",
        "detail",
        "journal_seq",
    )
    each = narrow.select("*", F.explode_outer("groups").alias("one")).withColumn("group", F.coalesce("one", "group"))
    # Where a dead letter was redriven to another topic, its new copy is that topic's: `detail` names it.
    here = (event == "redriven") & F.col("new_copy_id").isNotNull()
    here &= F.coalesce("detail", F.lit("")).isin("", F.col("topic"))
    minted = narrow.where(here).withColumns(
        {"event": F.lit(MINTED), "copy_id": F.col("new_copy_id"), "visible": F.col("at"), "stamp": F.col("at")}
    )
    columns = [name for name in narrow.columns if name not in ("groups", "new_copy_id", "detail")]
    return each.where(F.col("group").isNotNull()).select(*columns).unionByName(minted.select(*columns))


def stories(rows: DataFrame) -> DataFrame:
    """One row a (topic, group, copy) of `told` rows."""
    event = F.col("event")
    at, count, lease = F.col("at"), F.col("count"), F.col("lease")

    def among(*events: str) -> Column:
        return event.isin(*events)

    def first(*events: str) -> Column:
        return F.min(F.when(among(*events), at))

    def last(*events: str) -> Column:
        return F.max(F.when(among(*events), at))

    def number(*events: str) -> Column:
        return F.count_if(among(*events)).cast("int")

    bit = F.expr(f"shiftleft(1L, least(greatest(coalesce(count, 0), 0), {COUNT_BITS}))")
    return rows.groupBy(*KEY).agg(
        F.max("queue").alias("queue"),
        F.max(F.when(F.col("ordering_key").isNotNull(), F.xxhash64("ordering_key"))).alias("key"),
        F.max("visible").alias("visible"),
        F.min("stamp").alias("stamp"),
        first(*TOLD, MINTED).alias("told_at"),
        F.max(at).alias("last_at"),
        last("published").alias("published_at"),
        number("published").alias("published"),
        F.max(F.when(among("published"), F.xxhash64("proxy"))).alias("publisher"),
        number(MINTED).alias("minted"),
        number("delivered").alias("delivered"),
        F.bit_or(F.when(among("delivered"), bit)).alias("counts"),
        F.max(F.when(among("delivered"), count)).alias("count"),
        first("delivered").alias("first_delivered_at"),
        last("delivered").alias("last_delivered_at"),
        F.min(F.when(among("delivered") & (count >= 2), at)).alias("second_delivered_at"),
        F.max(F.when(among("delivered") & (F.coalesce(count, F.lit(1)) <= 1), F.xxhash64("proxy"))).alias("deliverer"),
        last("delivered", "extended").alias("held_at"),
        F.max(F.when(among("delivered", "extended"), at + lease)).alias("lease_until"),
        F.max(F.when(among("extended") & lease.isNull(), at)).alias("lengthened_at"),
        first(*LEASE_ENDS).alias("first_end_at"),
        last(*LEASE_ENDS).alias("last_end_at"),
        F.max(F.when(among(*LEASE_ENDS), count)).alias("ended_count"),
        number("acked").alias("acked"),
        F.min(F.when(among("acked"), count)).alias("acked_count"),
        number("dead_lettered").alias("dead_lettered"),
        number("purged").alias("purged"),
        number("discarded").alias("discarded"),
        number("redriven").alias("redriven"),
        *(number(event).alias(event) for event in FOUND.values()),
        first(*FINAL, *FOUND.values()).alias("ended_at"),
    )


def deletions(rows: DataFrame) -> DataFrame:
    """When each group was deleted last: (topic, group or null for all of the topic, deleted_at). As many rows as
    there were deletions: few."""
    return (
        rows.where(F.col("event").isin("group_deleted", "topic_deleted"))
        .select(
            "topic",
            F.when(F.col("event") == "group_deleted", F.col("group")).alias("group"),
            F.unix_micros("at").alias("at"),
        )
        .groupBy("topic", "group")
        .agg(F.max("at").alias("deleted_at"))
    )
