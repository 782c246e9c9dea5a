"""Who does the work: shares, rates and processing times of clients, queues and proxies; who hangs; what is hot.

Reads hand-outs and how they ended. A client *hangs* when it goes on taking messages and settles none; one that took its
last messages and was never heard of again has *vanished*. A queue is *hot* in a span of time in which it is sent
several times what its neighbours are: queues of a topic differ in their keys, and all have their busy hours, but no
queue is that far from the middle of the others by chance.
"""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

ENDS = ("acked", "released", "rejected", "expired")
SPAN_SECONDS = 300
"""Hot queues and hung clients are looked for in spans of so many seconds."""
HUNG_LEASES_MIN = 5
"""Leases that ran out, with nothing settled since: fewer prove nothing."""
HOT_RATIO, HOT_SCORE = 3.0, 8.0
"""Times the others' median, and so many standard deviations of it."""
ACCURACY = 1_000
"""Of percentiles: the error is one in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Tables, not computed yet."""

    clients: DataFrame
    """(topic, group, client, handed_out, acked, released, rejected, expired, share, busy_seconds, a_second,
    p50_seconds, p95_seconds, first_at, last_at, condition). `condition`: hangs, vanished, or null."""
    queues: DataFrame
    """(topic, queue, published, bytes, share, handed_out, p50_seconds, p95_seconds)."""
    proxies: DataFrame
    """(proxy, events, published, handed_out, share)."""
    skews: DataFrame
    """(topic, group, of, members, skew): the largest share against an even one."""
    hot: DataFrame
    """(topic, queue, since, messages, usual, score)."""


def balance(rows: DataFrame) -> Balance:
    """Of a journal's rows."""
    clients, queues, proxies = _clients(rows), _queues(rows), _proxies(rows)
    skews = _skew(clients, "client").unionByName(
        _skew(rows.where("event = 'delivered'").groupBy("topic", "group", "queue").agg(_count("handed_out")), "queue")
    )
    return Balance(clients=clients, queues=queues, proxies=proxies, skews=skews, hot=hot_queues(rows))


def hung_clients(rows: DataFrame) -> DataFrame:
    """(topic, group, client, condition, ran_out): those that hang or have vanished."""
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
    """(topic, queue, since, messages, usual, score), a row a queue and span in which it was hot."""
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
    total = F.sum("handed_out").over(Window.partitionBy(F.lit(0)))  # as many rows as there are proxies
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
