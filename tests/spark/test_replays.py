"""Batches that take long, or that fail and are requested again; proxies that end and come back."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from popgate_client import Client, OutgoingMessage
from spark.conftest import GROUP, SparkTopic, bodies_of
from support.processes import wait_until
from support.proxy import ProxyProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

Sink = Callable[["list[Row]"], None]
DEAD_URL = "http://127.0.0.1:1"


def run(spark: "SparkSession", topic: SparkTopic, folder: Path, sink: Sink, **options: object) -> None:
    """Drain the ready messages into `sink`, which gets each batch in its order."""

    def take(frame: "DataFrame", number: int) -> None:
        rows = frame.orderBy("position").collect()
        if rows:
            sink(rows)

    given = {**topic.options, **{name: str(value) for name, value in options.items()}}
    query = (
        spark.readStream.format("popgate")
        .options(**given)
        .load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_a_failed_batch_comes_again_with_exactly_the_same_rows(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    topic.publish(*(OutgoingMessage(body=f"m{number}", ordering_key=f"k{number % 7}") for number in range(40)))
    seen: list[list[Row]] = []

    def full_at_first(rows: "list[Row]") -> None:
        seen.append(rows)
        if len(seen) == 2:
            raise RuntimeError("the disk is full")

    with pytest.raises(Exception, match="the disk is full"):
        run(spark, topic, tmp_path, full_at_first, maxMessagesPerBatch=20, partitions=3)
    topic.publish("late")
    run(spark, topic, tmp_path, full_at_first, maxMessagesPerBatch=5, partitions=1)
    assert [len(rows) for rows in seen] == [20, 20, 20, 1]
    assert seen[2] == seen[1]
    assert len({row["body"] for rows in seen for row in rows}) == 41
    assert topic.lease_groups() == []


def test_leases_last_for_as_long_as_spark_works_on_the_batch(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    topic.publish_numbered(10)
    seen: list[str] = []

    def slow(rows: "list[Row]") -> None:
        assert topic.client.pop(topic.name, GROUP, wait_seconds=4) == [], "four times the leases' length"
        seen.extend(bodies_of(rows))

    run(spark, topic, tmp_path, slow, invisibilitySeconds=1)
    assert len(seen) == 10
    assert (topic.state()["ready"], topic.state()["in_flight"]) == (0, 0)


def test_what_a_rival_takes_of_a_failed_batch_is_the_rivals_alone(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    published = topic.publish_numbered(20)
    seen: list[str] = []

    def broken(rows: "list[Row]") -> None:
        raise RuntimeError("the disk is full")

    with pytest.raises(Exception, match="the disk is full"):
        run(spark, topic, tmp_path, broken, invisibilitySeconds=1)
    wait_until(
        lambda: topic.state()["ready"] == 20, timeout_seconds=30, what="the leases' end: no heart beats any more"
    )
    rival = topic.client.pop(topic.name, GROUP, max_messages=5)
    run(spark, topic, tmp_path, lambda rows: seen.extend(bodies_of(rows)))
    assert len(seen) == 15
    assert sorted([*seen, *(one.text for one in rival)]) == sorted(published)


def test_a_batch_that_is_worked_on_for_too_long_is_let_go(
    spark: "SparkSession", topic: SparkTopic, tmp_path: Path
) -> None:
    topic.publish_numbered(3)
    rival: list[str] = []

    def hung(rows: "list[Row]") -> None:
        rival.extend(one.text for one in topic.client.pop(topic.name, GROUP, max_messages=3, wait_seconds=20))

    run(spark, topic, tmp_path, hung, invisibilitySeconds=1, holdSecondsMax=2)
    assert len(rival) == 3


def test_a_query_goes_on_over_proxies_that_are_down_or_come_back(spark: "SparkSession", tmp_path: Path) -> None:
    seen: list[str] = []
    with ProxyProcess(tmp_path / "proxy") as proxy, Client(proxy.url, retry_seconds_max=60) as client:
        topic = SparkTopic(f"{DEAD_URL},{proxy.url}", client)
        published = topic.publish_numbered(40)

        def start_later() -> None:
            time.sleep(1.0)  # by then Spark has asked
            proxy.start()

        def kill(rows: "list[Row]") -> None:
            seen.extend(bodies_of(rows))
            if len(seen) == 20:
                proxy.kill()
                threads.append(threading.Thread(target=start_later))
                threads[0].start()

        threads: list[threading.Thread] = []
        run(spark, topic, tmp_path, kill, maxMessagesPerBatch=20)
        threads[0].join()
        assert sorted(seen) == sorted(published)
        assert topic.lease_groups() == []


def test_a_drain_of_rabbitmq_takes_everything(spark: "SparkSession", amqp_url: str, tmp_path: Path) -> None:
    seen: list[Row] = []
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url) as proxy, Client(proxy.url) as client:
        topic = SparkTopic(proxy.url, client)
        for start in range(0, 3_000, 1_000):
            bodies = [f"m{number}" for number in range(start, start + 1_000)]
            topic.publish(
                *(OutgoingMessage(body=body, ordering_key=f"k{number % 50}") for number, body in enumerate(bodies))
            )
        run(spark, topic, tmp_path, seen.extend, maxMessagesPerBatch=1_000)
        assert len(seen) == 3_000
        by_key: dict[str, list[int]] = {}
        for row in seen:
            by_key.setdefault(row["ordering_key"], []).append(int(bytes(row["body"])[1:]))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), "in the order of each key"
        assert sum(map(len, by_key.values())) == 3_000
        assert topic.lease_groups() == []
