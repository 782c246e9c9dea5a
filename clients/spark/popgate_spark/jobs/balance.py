"""Measures shares, rates and processing times of clients, queues and proxies; finds hung clients and hot queues.

Reads deliveries and their ends. A client *hangs* if it continues to take messages and settles none; it has *vanished*
if it took messages and then did nothing more. A queue is *hot* in a span of time in which it gets several times as many
messages as the other queues of its topic: queues differ in their keys, and all have busy hours, but such a distance
from the median is not chance.
"""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

ENDS = ("acked", "released", "rejected", "expired")
SPAN_SECONDS = 300
"""Length in seconds of the spans in which hot queues and hung clients are searched."""
HUNG_LEASES_MIN = 5
"""Minimum number of expired leases, with nothing settled since, of a hung client."""
HOT_RATIO, HOT_SCORE = 3.0, 8.0
"""A hot queue has more messages than this many times the queues' median, and exceeds it by more standard deviations
(the square root of the median) than the score."""
ACCURACY = 1_000
"""Accuracy of percentiles: the relative error of the rank is 1/ACCURACY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Tables that are not computed yet."""

    clients: DataFrame
    """(topic, group, client, handed_out, acked, released, rejected, expired, share, busy_seconds, a_second,
    p50_seconds, p95_seconds, first_at, last_at, condition). `condition`: hangs, vanished, or null."""
    queues: DataFrame
    """(topic, queue, published, bytes, share, handed_out, p50_seconds, p95_seconds)."""
    proxies: DataFrame
    """(proxy, events, published, handed_out, share)."""
    skews: DataFrame
    """(topic, group, of, members, skew): the ratio of the largest share to an even share."""
    hot: DataFrame
    """(topic, queue, since, messages, usual, score)."""


def balance(rows: DataFrame) -> Balance:
    """Measure the balance of a journal's rows."""
    clients, queues, proxies = _clients(rows), _queues(rows), _proxies(rows)
    skews = _skew(clients, "client").unionByName(
        _skew(rows.where("event = 'delivered'").groupBy("topic", "group", "queue").agg(_count("handed_out")), "queue")
    )
    return Balance(clients=clients, queues=queues, proxies=proxies, skews=skews, hot=hot_queues(rows))


def hung_clients(rows: DataFrame) -> DataFrame:
    """Return the clients that hang or have vanished: (topic, group, client, condition, ran_out)."""
    span = F.floor(F.unix_seconds("at") / SPAN_SECONDS)
    event = F.col("event")
    spans = (
        rows.where(event.isin("delivered", *ENDS) & F.col("client").isNotNull())
        .groupBy("topic", "group", "client", span.alias("span"))
        .agg(
            F.count_if(event.isin("acked", "released", "rejected")).alias("settled"),
            F.count_if(event == "expired").alias("expired"),
            F.count_if(event == "delivered").alias("taken"),
        )
    )
    everything = Window.partitionBy("topic", "group", "client")
    last = F.max(F.when(F.col("settled") > 0, F.col("span"))).over(everything)
    since = spans.withColumn("last", F.coalesce(last, F.lit(-1))).where("span > last")
    found = since.groupBy("topic", "group", "client").agg(
        F.sum("expired").alias("ran_out"), F.sum("taken").alias("taken")
    )
    return found.where(F.col("ran_out") >= HUNG_LEASES_MIN).select(
        *("topic", "group", "client"),
        F.when(F.col("taken") > 0, "hangs").otherwise("vanished").alias("condition"),
        "ran_out",
    )


def hot_queues(rows: DataFrame) -> DataFrame:
    """Return one row per hot queue and span: (topic, queue, since, messages, usual, score)."""
    since = F.timestamp_seconds(F.floor(F.unix_seconds("at") / SPAN_SECONDS) * SPAN_SECONDS)
    counts = (
        rows.where("event = 'published' and queue is not null")
        .groupBy("topic", "queue", since.alias("since"))
        .agg(F.count("*").alias("messages"))
    )
    usual = counts.groupBy("topic", "since").agg(
        F.percentile("messages", F.lit(0.5)).alias("usual"), F.count("*").alias("queues")
    )
    score = (F.col("messages") - F.col("usual")) / F.sqrt(F.greatest("usual", F.lit(1.0)))
    return (
        counts.join(usual, ["topic", "since"])
        .where("queues > 2")
        .withColumn("score", F.round(score, 1))
        .where((F.col("messages") > HOT_RATIO * F.col("usual")) & (F.col("score") > HOT_SCORE))
        .select("topic", "queue", "since", "messages", "usual", "score")
    )


def _clients(rows: DataFrame) -> DataFrame:
    event = F.col("event")
    known = rows.where(event.isin("delivered", *ENDS) & F.col("client").isNotNull())
    settled = event.isin("acked", "released", "rejected")
    by_client = known.groupBy("topic", "group", "client").agg(
        F.count_if(event == "delivered").alias("handed_out"),
        *(F.count_if(event == name).alias(name) for name in ENDS),
        F.sum(F.when(event != "delivered", F.col("held_seconds"))).alias("busy_seconds"),
        _percentile(settled, 0.5).alias("p50_seconds"),
        _percentile(settled, 0.95).alias("p95_seconds"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
    )
    total = F.sum("handed_out").over(Window.partitionBy("topic", "group"))
    lasted = F.greatest(F.unix_seconds("last_at") - F.unix_seconds("first_at"), F.lit(1))
    return by_client.withColumns(
        {"share": F.col("handed_out") / F.greatest(total, F.lit(1)), "a_second": F.col("acked") / lasted}
    ).join(hung_clients(rows), ["topic", "group", "client"], "left")


def _queues(rows: DataFrame) -> DataFrame:
    event = F.col("event")
    by_queue = rows.where(event.isin("published", "delivered", "acked") & F.col("queue").isNotNull())
    counted = by_queue.groupBy("topic", "queue").agg(
        F.count_if(event == "published").alias("published"),
        F.sum(F.when(event == "published", F.col("size_bytes"))).cast("long").alias("bytes"),
        F.count_if(event == "delivered").alias("handed_out"),
        _percentile(event == "acked", 0.5).alias("p50_seconds"),
        _percentile(event == "acked", 0.95).alias("p95_seconds"),
    )
    total = F.sum("published").over(Window.partitionBy("topic"))
    return counted.withColumn("share", F.col("published") / F.greatest(total, F.lit(1)))


def _proxies(rows: DataFrame) -> DataFrame:
    event = F.col("event")
    counted = rows.groupBy("proxy").agg(
        F.count("*").alias("events"),
        F.count_if(event == "published").alias("published"),
        F.count_if(event == "delivered").alias("handed_out"),
    )
    total = F.sum("handed_out").over(Window.partitionBy(F.lit(0)))  # one row per proxy
    return counted.withColumn("share", F.col("handed_out") / F.greatest(total, F.lit(1)))


def _skew(counted: DataFrame, of: str) -> DataFrame:
    return (
        counted.groupBy("topic", "group")
        .agg(F.count("*").alias("members"), (F.max("handed_out") / F.avg("handed_out")).alias("skew"))
        .select("topic", "group", F.lit(of).alias("of"), "members", "skew")
    )


def _count(name: str) -> Column:
    return F.count("*").alias(name)


def _percentile(among: Column, share: float) -> Column:
    return F.percentile_approx(F.when(among, F.col("held_seconds")), share, ACCURACY)
