"""Turns the journal's rows into stories: what happened to each copy in each group, one per (topic, group, copy).

Theory of operation. A row of the journal is about one copy in one group, but `published` names all groups of its topic,
and `redriven` begins the story of another copy; `told` makes one row of each. One hash aggregation then makes the
stories. They contain only numbers (counts and times), so that Spark need not sort or keep texts. What these don't show
(whether one of several deliveries overlapped the previous one) is looked up in the rows of the few doubtful stories:
see `faults`.

Times are microseconds since 1970, by the clock of the proxy that wrote the row.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MINTED = "minted"
"""Event of a copy that a redrive has made: its story begins with this, as others begin with `published`."""
TOLD = (
    *("published", "delivered", "acked", "released", "extended", "expired", "rejected", "dead_lettered", "redriven"),
    *("purged", "discarded"),
)
"""Events that belong to a story."""
FINAL = ("acked", "dead_lettered", "purged", "discarded", "redriven")
"""Events that end a story. The story of a dead letter ends when it is redriven or purged."""
LEASE_ENDS = ("released", "expired", "rejected")
FOUND = {"acked": "found_acked", "dead_lettered": "found_dead", "discarded": "found_discarded"}
"""Events for `found_settled`, by its detail: how a story ended whose end was not recorded, or was recorded before."""
FOUND_SETTLED = "found_settled"
KEY = ("topic", "group", "copy_id")
SECOND = 1_000_000
COUNT_BITS = 62
"""Delivery counts from this one on share a bit."""
BITS = {event: 1 << number for number, event in enumerate((*TOLD, MINTED, *FOUND.values()))}
"""The bit of each event: stories store and compare bits and no texts."""


def told(rows: DataFrame) -> DataFrame:
    """Return the journal's rows, one for each group that they concern, with only the columns that stories need."""
    event = F.col("event")
    ours = event.isin(*TOLD, FOUND_SETTLED) & F.col("copy_id").isNotNull() & F.col("topic").isNotNull()
    # If a dead letter was redriven to another topic, its new copy belongs to that topic, which `detail` names.
    mints = (event == "redriven") & F.col("new_copy_id").isNotNull()
    mints &= F.coalesce("detail", F.lit("")).isin("", F.col("topic"))
    parts = F.when(event == "published", F.split("groups", ",")).when(mints, F.array(F.lit(None), "new_copy_id"))
    each = rows.where(ours).select("*", F.explode_outer(parts).alias("part"))
    is_minted = (event == "redriven") & F.col("part").isNotNull()
    told = each.select(
        F.unix_micros("at").alias("at"),
        F.when(event == FOUND_SETTLED, F.concat(F.lit("found_"), "detail"))
        .when(is_minted, MINTED)
        .otherwise(event)
        .alias("event"),
        "topic",
        F.when(event == "published", F.coalesce("part", "group")).otherwise(F.col("group")).alias("group"),
        "queue",
        F.when(is_minted, F.col("part")).otherwise(F.col("copy_id")).alias("copy_id"),
        "message_id",
        "ordering_key",
        F.col("delivery_count").alias("count"),
        "client",
        "proxy",
        F.unix_micros(F.when(is_minted, F.col("at")).otherwise(F.col("published_at"))).alias("stamp"),
        F.unix_micros(F.when(is_minted, F.col("at")).otherwise(F.col("visible_at"))).alias("visible"),
        (F.col("invisibility_seconds") * SECOND).cast("long").alias("lease"),
        "journal_seq",
    )
    return told.where(F.col("group").isNotNull())


def stories(rows: DataFrame) -> DataFrame:
    """Aggregate `told` rows to one row per (topic, group, copy)."""
    at, count, lease = F.col("at"), F.col("count"), F.col("lease")

    def first(*events: str) -> Column:
        return F.min(F.when(among(*events), at))

    def last(*events: str) -> Column:
        return F.max(F.when(among(*events), at))

    def number(*events: str) -> Column:
        return F.count_if(among(*events)).cast("int")

    count_bit = F.expr(f"shiftleft(1L, least(greatest(coalesce(count, 0), 0), {COUNT_BITS}))")
    narrow = rows.select(
        *(*KEY, "at", "queue", "visible", "stamp", "count", "lease"),
        F.coalesce(*(F.when(F.col("event") == one, bit) for one, bit in BITS.items()), F.lit(0)).alias("events"),
        F.when(F.col("ordering_key").isNotNull(), F.xxhash64("ordering_key")).alias("key"),
        F.xxhash64("proxy").alias("proxy"),
    )
    # The rows of a copy are far apart in the journal: aggregated before the shuffle, they would be no fewer, and wider.
    placed = narrow.repartition(*KEY)
    return placed.groupBy(*KEY).agg(
        F.bit_or("events").alias("events"),
        F.max("queue").alias("queue"),
        F.max("key").alias("key"),
        F.max("visible").alias("visible"),
        F.min("stamp").alias("stamp"),
        F.max(at).alias("last_at"),
        last("published").alias("published_at"),
        number("published").alias("published"),
        F.max(F.when(among("published"), F.col("proxy"))).alias("publisher"),
        number("delivered").alias("delivered"),
        F.bit_or(F.when(among("delivered"), count_bit)).alias("counts"),
        F.max(F.when(among("delivered"), count)).alias("count"),
        first("delivered").alias("first_delivered_at"),
        last("delivered").alias("last_delivered_at"),
        F.min(F.when(among("delivered") & (count >= 2), at)).alias("second_delivered_at"),
        F.max(F.when(among("delivered") & (F.coalesce(count, F.lit(1)) <= 1), F.col("proxy"))).alias("deliverer"),
        last("delivered", "extended").alias("held_at"),
        F.max(F.when(among("delivered", "extended"), at + lease)).alias("lease_until"),
        F.max(F.when(among("extended") & lease.isNull(), at)).alias("lengthened_at"),
        first(*LEASE_ENDS).alias("first_end_at"),
        last(*LEASE_ENDS).alias("last_end_at"),
        F.max(F.when(among(*LEASE_ENDS), count)).alias("ended_count"),
        number("acked").alias("acked"),
        F.min(F.when(among("acked"), count)).alias("acked_count"),
        first(*FINAL, *FOUND.values()).alias("ended_at"),
    )


def among(*events: str) -> Column:
    """Whether the column `events`, of a row or of a story, contains one of these events."""
    return F.col("events").bitwiseAND(sum(BITS[one] for one in events)) != 0


def deletions(rows: DataFrame) -> DataFrame:
    """Return when each group was last deleted: (topic, group or null for the whole topic, deleted_at). There are few
    rows."""
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
