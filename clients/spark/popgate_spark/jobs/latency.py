"""How long messages take: from when they could be had to their first hand-out, and from there to the ack; and how many
wait. In steps of time, in batch or while the journal is being written.

Only first hand-outs count for the first figure, so that a retry is no delay of its own. What waits is counted as what
came in less what ended; it begins with 0 at the journal's first hour.
"""

from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

SHARES = (0.5, 0.9, 0.99)
ACCURACY = 1_000
ENDED = ("acked", "dead_lettered", "purged", "discarded")
STEPS = (1, 5, 10, 30, 60, 300, 900, 1_800, 3_600, 10_800, 86_400)
POINTS_MAX = 200
"""Steps that a range is cut into, so that its plot stays readable."""
LATE_SECONDS = 600
"""Streaming: a file may come so long after what is in it, for that is how long a proxy collects events."""
COLUMNS = ("topic", "group", "since")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Tables, not computed yet."""

    steps: DataFrame
    """(topic, group, since, came, delivered, ended, waiting, to_delivery_p50, _p90, _p99, _max, to_ack_...)."""
    totals: DataFrame
    """The same of the whole range, by topic and group, without `since` and `waiting`."""


def latency(rows: DataFrame, step_seconds: int) -> Latency:
    """Of a journal's rows."""
    events = timed(rows)
    since = F.timestamp_seconds(F.floor(F.unix_seconds("at") / step_seconds) * step_seconds)
    steps = _measured(events.groupBy("topic", "group", since.alias("since")).agg(*_figures()))
    order = Window.partitionBy("topic", "group").orderBy("since").rowsBetween(Window.unboundedPreceding, 0)
    waiting = F.greatest(F.sum(F.col("came") - F.col("ended")).over(order), F.lit(0))
    totals = _measured(events.groupBy("topic", "group").agg(*_figures()))
    return Latency(steps=steps.withColumn("waiting", waiting), totals=totals)


def live(rows: DataFrame, step_seconds: int, late_seconds: int = LATE_SECONDS) -> DataFrame:
    """The steps of a stream of rows, each told once, when nothing of it can come any more. Without `waiting`."""
    stream = timed(rows.withWatermark("at", f"{late_seconds} seconds"))
    window = F.window("at", f"{step_seconds} seconds")
    told = stream.groupBy("topic", "group", window).agg(*_figures())
    return _measured(told.withColumn("since", F.col("window.start")).drop("window"))


def step_for(span: timedelta) -> int:
    """Seconds of a step that cuts `span` into POINTS_MAX at most."""
    return next((step for step in STEPS if span.total_seconds() / step <= POINTS_MAX), STEPS[-1])


def timed(rows: DataFrame) -> DataFrame:
    """One row an event and group: (at, topic, group, event, to_delivery, to_ack), in seconds."""
    event = F.col("event")
    groups = F.when(event == "published", F.split("groups", ","))
    is_first = (event == "delivered") & (F.coalesce("delivery_count", F.lit(1)) <= 1)
    visible = F.unix_micros(F.coalesce("visible_at", "published_at"))
    return (
        rows.where(event.isin("published", "delivered", *ENDED))
        .select(
            "at",
            "topic",
            F.col("group").alias("own"),
            "event",
            # Clocks of proxies differ by milliseconds: less than nothing is nothing.
            F.when(is_first, F.greatest((F.unix_micros("at") - visible) / 1e6, F.lit(0.0))).alias("to_delivery"),
            F.when(event == "acked", F.col("held_seconds")).alias("to_ack"),
            F.explode_outer(groups).alias("one"),
        )
        .withColumn("group", F.coalesce("one", "own"))
        .where("group is not null")
        .drop("one", "own")
    )


def _figures() -> list[Column]:
    event = F.col("event")
    return [
        F.count_if(event == "published").alias("came"),
        F.count_if(event == "delivered").alias("delivered"),
        F.count_if(event.isin(*ENDED)).alias("ended"),
        *(
            F.percentile_approx(name, [*SHARES, 1.0], ACCURACY).alias(f"{name}_shares")
            for name in ("to_delivery", "to_ack")
        ),
    ]


def _measured(found: DataFrame) -> DataFrame:
    named = [*(f"p{int(100 * share)}" for share in SHARES), "max"]
    columns = {
        f"{name}_{label}": F.col(f"{name}_shares")[index]
        for name in ("to_delivery", "to_ack")
        for index, label in enumerate(named)
    }
    return found.withColumns(columns).drop("to_delivery_shares", "to_ack_shares")
