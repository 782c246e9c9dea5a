"""Measures how long messages take from visibility to their first delivery, and from delivery to ack, and how many wait.
The figures are per time step, in batch or while the journal is being written.

Only first deliveries count for the first figure, so that a retry does not count as a delay. The number of waiting
messages is the number published minus the number ended; it starts at 0 at the journal's first hour.
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
"""Maximum number of steps of a range, so that its plot stays readable."""
LATE_SECONDS = 600
"""Streaming: maximum seconds between an event and its file, because a proxy collects events for that long."""
COLUMNS = ("topic", "group", "since")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Tables that are not computed yet."""

    steps: DataFrame
    """(topic, group, since, came, delivered, ended, waiting, to_delivery_p50, _p90, _p99, _max, to_ack_...)."""
    totals: DataFrame
    """The same for the whole range, by topic and group, without `since` and `waiting`."""


def latency(rows: DataFrame, step_seconds: int) -> Latency:
    """Measure the latency of a journal's rows."""
    events = timed(rows)
    since = F.timestamp_seconds(F.floor(F.unix_seconds("at") / step_seconds) * step_seconds)
    steps = _measured(events.groupBy("topic", "group", since.alias("since")).agg(*_figures()))
    order = Window.partitionBy("topic", "group").orderBy("since").rowsBetween(Window.unboundedPreceding, 0)
    waiting = F.greatest(F.sum(F.col("came") - F.col("ended")).over(order), F.lit(0))
    totals = _measured(events.groupBy("topic", "group").agg(*_figures()))
    return Latency(steps=steps.withColumn("waiting", waiting), totals=totals)


def live(rows: DataFrame, step_seconds: int, late_seconds: int = LATE_SECONDS) -> DataFrame:
    """Return the steps of a stream of rows, without `waiting`; each is emitted once, when it is complete."""
    stream = timed(rows.withWatermark("at", f"{late_seconds} seconds"))
    window = F.window("at", f"{step_seconds} seconds")
    told = stream.groupBy("topic", "group", window).agg(*_figures())
    return _measured(told.withColumn("since", F.col("window.start")).drop("window"))


def step_for(span: timedelta) -> int:
    """Return the length in seconds of steps that divide `span` into at most POINTS_MAX."""
    return next((step for step in STEPS if span.total_seconds() / step <= POINTS_MAX), STEPS[-1])


def timed(rows: DataFrame) -> DataFrame:
    """Return one row per event and group: (at, topic, group, event, to_delivery, to_ack), times in seconds."""
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
            # Clocks of proxies differ by milliseconds, so a negative time counts as 0.
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
