"""The Spark source against the plain Python client: 50,000 messages a batch, against successive pops of 256.

Both read and ack everything; the source writes to Spark's no-op sink. Its time runs from the query's start to its end,
over four batches (the session is already running): a query's start takes as long as a quarter of a batch.
"""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench import load
from bench.report import Rates, Report, Row
from popgate_client import Client
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode
from support.spark import started_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 200_000
BATCH, POP = 50_000, 256
PARTITIONS = 2
ROUNDS = 3
WARM_UP = 1_000
TOPIC, GROUP = "bench", "default"
TARGET = 1.0


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add interleaved rounds on both brokers, and the medians of their ratios."""
    total, rates = int(MESSAGES * scale), Rates()
    with ExitStack() as stack:
        spark = stack.enter_context(started_spark(folder / "spark", spark__driver__defaultJavaOptions=""))
        rabbitmq.add_vhost("spark")
        proxies: dict[str, ProxyProcess] = {}
        for broker, flags in (("rabbitmq", ["--amqp-url", rabbitmq.amqp_url("spark")]), ("embedded", list[str]())):
            proxies[broker] = stack.enter_context(ProxyProcess(folder / f"spark-{broker}", *flags))
            load.make_topic(proxies[broker])
            asyncio.run(load.fill(proxies[broker].port, total=WARM_UP))
            source_rate(spark, proxies[broker].url, folder / f"warm-{broker}", WARM_UP)
        for number in range(ROUNDS):
            print(f"the Spark source: round {number + 1} of {ROUNDS}", flush=True)
            for broker, proxy in proxies.items():
                asyncio.run(load.fill(proxy.port, total=total))
                rates.note(f"{broker} client", client_rate(proxy.url, total))
                asyncio.run(load.fill(proxy.port, total=total))
                checkpoint = folder / f"checkpoint-{broker}-{number}"
                rates.note(f"{broker} source", source_rate(spark, proxy.url, checkpoint, total))
    for broker in proxies:
        ratio = rates.ratio(f"{broker} source", f"{broker} client")
        report.add(
            Row(
                name=f"{broker}: Spark source, {BATCH:,} messages a batch",
                value=rates.median(f"{broker} source"),
                unit="msg/s",
                against=f"Python client, pops of {POP}",
                ratio=ratio,
                target=f">= {TARGET:g}x",
                reached=ratio >= TARGET,
            )
        )


def client_rate(url: str, total: int) -> float:
    """Return messages a second of one client that pops and acks."""
    with Client(url) as client:
        started = time.perf_counter()
        left = total
        while left > 0:
            messages = client.pop(TOPIC, GROUP, max_messages=POP, wait_seconds=5, invisibility_seconds=600)
            if not messages:
                raise RuntimeError(f"{left} of {total} messages did not come")
            assert all(result.ok for result in client.ack(TOPIC, GROUP, messages))
            left -= len(messages)
        return total / (time.perf_counter() - started)


def source_rate(spark: "SparkSession", url: str, checkpoint: Path, total: int) -> float:
    """Return messages a second of a query that drains the topic."""
    options = {"url": url, "topic": TOPIC, "group": GROUP, "partitions": f"{PARTITIONS}"}
    frame = spark.readStream.format("popgate").options(**options, maxMessagesPerBatch=f"{BATCH}").load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    started = time.perf_counter()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - started
    read = sum(int(progress["numInputRows"]) for progress in query.recentProgress)
    if read != total:
        raise RuntimeError(f"the source read {read} messages, not {total}")
    return total / seconds
