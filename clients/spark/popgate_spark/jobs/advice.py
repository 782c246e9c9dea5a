"""Advises on the invisibility timeout, max_in_flight, consumers and queues of each subscription, each with a reason.

The timeout is derived from the tail of the processing times. An expired lease shows only that the work takes longer: it
is censored, and a percentile of the other leases would never exceed the current timeout. So the share of work that is
unfinished after t seconds is estimated with the Kaplan-Meier method, from first deliveries only, because later ones may
be those of difficult messages. If more leases expired than the wanted quantile allows, the tail is unknown: the advice
is to double the timeout and measure again. Clients that hang are left out, because they say nothing about the work.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from popgate_spark.jobs.balance import hung_clients

QUANTILE = 0.999
SAFETY = 1.5
"""Factor from the quantile to the timeout, because future work may be slower."""
BUCKETS_A_FACTOR = 20
"""Buckets of times per factor e: their borders are e^(1/20) apart, which is 5 %."""
MILLISECOND = 0.001
ENDS_MIN = 200
"""Minimum number of ended first deliveries from which a tail is estimated."""
INVISIBILITY_SECONDS_MAX = 43_200
NICE_SECONDS = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 28_800)
UTILISATION = 0.7
"""Wanted utilisation of consumers in the busiest minutes."""
IN_FLIGHT_FACTOR, IN_FLIGHT_MIN = 3, 100
QUEUE_RATE = 1_000.0
"""Messages per second that one queue handles easily."""
SUBSCRIPTIONS_MAX = 500
"""Maximum number of subscriptions that get advice; each has at most a few hundred buckets."""
BUCKETS_MAX = 500 * SUBSCRIPTIONS_MAX


class Bucket(NamedTuple):
    """Numbers of first deliveries that ended after up to `seconds`, with their work done or unfinished."""

    seconds: float
    done: int
    unfinished: int


class Tail(NamedTuple):
    """The tail of the processing times. `seconds` None: the data do not determine the quantile."""

    seconds: float | None
    expired_share: float
    ends: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice for one setting of one subscription. `wanted` None: no advice is possible; `reason` says why."""

    topic: str
    group: str
    setting: str
    present: float | None
    wanted: float | None
    reason: str


def advise(rows: DataFrame, *, quantile: float = QUANTILE) -> list[Advice]:
    """Return advice for every subscription in a journal's rows."""
    sane = rows.join(F.broadcast(hung_clients(rows)), ["topic", "group", "client"], "left_anti")
    buckets: defaultdict[tuple[str, str], list[Bucket]] = defaultdict(list)
    for row in _buckets(sane).limit(BUCKETS_MAX).collect():
        buckets[row["topic"], row["group"]].append(Bucket(row["seconds"], row["done"], row["unfinished"]))
    loads = _loads(sane, rows).limit(SUBSCRIPTIONS_MAX).collect()
    advice: list[Advice] = []
    for row in loads:
        name = (row["topic"], row["group"])
        measured = tail(sorted(buckets[name]), quantile)
        present = row["invisibility_seconds"]
        advice.append(_timeout(*name, measured, present, quantile))
        load = Load(
            peak_rate=row["peak"] / 60,
            held_seconds=row["held_seconds"] or 0.0,
            clients=row["clients"],
            busy_seconds=row["busy_seconds"] or 0.0,
            seconds=max(row["seconds"], 1),
            queues=row["queues"],
            proxies=row["proxies"],
        )
        advice += _capacity(*name, load)
    return advice


def tail(buckets: Sequence[Bucket], quantile: float) -> Tail:
    """Estimate with Kaplan-Meier after how long a share `quantile` of the work is done. `buckets` must be sorted."""
    total = sum(one.done + one.unfinished for one in buckets)
    unfinished = sum(one.unfinished for one in buckets)
    at_risk, at_work = total, 1.0
    for one in buckets:
        if at_risk > 0:
            at_work *= 1 - one.done / at_risk
        at_risk -= one.done + one.unfinished
        if 1 - at_work >= quantile - 1e-12:
            return Tail(one.seconds, unfinished / total, total)
    return Tail(None, unfinished / total if total else 0.0, total)


class Load(NamedTuple):
    """The load of a subscription. `peak_rate`: messages per second in the busiest minutes. `held_seconds`: average time
    from delivery to ack."""

    peak_rate: float
    held_seconds: float
    clients: int
    busy_seconds: float
    seconds: int
    queues: int
    proxies: int


def _timeout(topic: str, group: str, measured: Tail, present: float | None, quantile: float) -> Advice:
    share, percent = f"{100 * measured.expired_share:.2g} %", f"{100 * quantile:g} %"
    if measured.ends < ENDS_MIN:
        wanted, why = None, f"only {measured.ends} first deliveries ended: {ENDS_MIN} are needed to estimate a tail"
    elif measured.seconds is None:
        wanted = None if present is None else float(nice(2 * present))
        why = (
            f"{share} of first leases expired, more than the {100 * (1 - quantile):.2g} % that may: how long the rest"
            " takes is not identifiable. Double the timeout and measure again"
        )
    else:
        wanted = float(nice(SAFETY * measured.seconds))
        why = (
            f"{percent} of the work is done after {measured.seconds:.3g} s (Kaplan-Meier over {measured.ends:,} first"
            f" deliveries, of which {share} expired); {SAFETY:g} times that"
        )
    return Advice(topic=topic, group=group, setting="invisibility_seconds", present=present, wanted=wanted, reason=why)


def _capacity(topic: str, group: str, load: Load) -> Iterable[Advice]:
    at_once = load.peak_rate * load.held_seconds
    in_flight = max(IN_FLIGHT_MIN, IN_FLIGHT_FACTOR * math.ceil(at_once))
    yield Advice(
        topic=topic,
        group=group,
        setting="max_in_flight",
        present=None,
        wanted=float(in_flight),
        reason=f"at its busiest {load.peak_rate:.3g} messages/s times {load.held_seconds:.3g} s are {at_once:.3g}"
        f" leases at once; {IN_FLIGHT_FACTOR} times that, {IN_FLIGHT_MIN} at least: a client that hangs can't take all",
    )
    each = max(1.0, load.busy_seconds / load.seconds / max(load.clients, 1))
    needed = max(1, math.ceil(at_once / each / UTILISATION))
    yield Advice(
        topic=topic,
        group=group,
        setting="consumers",
        present=float(load.clients),
        wanted=float(needed),
        reason=f"{at_once:.3g} leases at once at the busiest, {each:.2g} for each consumer as so far, busy for"
        f" {100 * UTILISATION:g} % of the time",
    )
    queues = max(math.ceil(load.peak_rate / QUEUE_RATE), load.proxies)
    enough = load.queues >= queues
    yield Advice(
        topic=topic,
        group=group,
        setting="queues",
        present=float(load.queues),
        wanted=float(max(queues, load.queues)),
        reason=("enough: " if enough else "")
        + f"one for each {QUEUE_RATE:,.0f} messages/s of the busiest minute, and at least one for each of"
        f" {load.proxies} proxies. Fewer are not advised: keys would move"
        + ("" if enough else ". Change it when the queues are empty (popgate topics create)"),
    )


def _buckets(rows: DataFrame) -> DataFrame:
    """Count the ended first deliveries by time: (topic, group, seconds, done, unfinished), few rows."""
    event = F.col("event")
    number = F.ceil(F.log(F.greatest(F.col("held_seconds"), F.lit(MILLISECOND)) / MILLISECOND) * BUCKETS_A_FACTOR)
    return (
        rows.where(
            event.isin("acked", "rejected", "released", "expired")
            & F.col("held_seconds").isNotNull()
            & (F.coalesce("delivery_count", F.lit(1)) == 1)
        )
        .groupBy("topic", "group", number.alias("bucket"))
        .agg(
            F.count_if(event.isin("acked", "rejected")).alias("done"),
            F.count_if(event.isin("released", "expired")).alias("unfinished"),
        )
        .withColumn("seconds", F.exp(F.col("bucket") / BUCKETS_A_FACTOR) * MILLISECOND)
    )


def _loads(sane: DataFrame, rows: DataFrame) -> DataFrame:
    """Measure the load of each subscription, one row each."""
    event = F.col("event")
    minutes = (
        rows.where(event == "delivered")
        .groupBy("topic", "group", F.date_trunc("minute", "at").alias("minute"))
        .agg(F.count("*").alias("messages"))
        .groupBy("topic", "group")
        .agg(F.percentile_approx("messages", 0.99).alias("peak"))
    )
    work = (
        sane.where(event.isin("delivered", "acked") & F.col("group").isNotNull())
        .groupBy("topic", "group")
        .agg(
            F.avg(F.when(event == "acked", F.col("held_seconds"))).alias("held_seconds"),
            F.sum(F.when(event == "acked", F.col("held_seconds"))).alias("busy_seconds"),
            F.count_distinct("client").alias("clients"),
            F.count_distinct("queue").alias("queues"),
            F.count_distinct("proxy").alias("proxies"),
            (F.unix_seconds(F.max("at")) - F.unix_seconds(F.min("at"))).alias("seconds"),
            F.mode(F.when(event == "delivered", F.col("invisibility_seconds"))).alias("invisibility_seconds"),
        )
    )
    return work.join(minutes, ["topic", "group"]).orderBy("topic", "group")


def nice(seconds: float) -> int:
    """Round up to a round number of seconds."""
    chosen = next((one for one in NICE_SECONDS if one >= seconds - 1e-9), None)
    return chosen if chosen is not None else min(INVISIBILITY_SECONDS_MAX, math.ceil(seconds / 3_600) * 3_600)
