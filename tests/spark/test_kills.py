"""Kill -9 of the driver and its JVM at every step, of executors and of the proxy: a Parquet sink has each message once,
and what another query of that driver publishes is published once.

The short version takes some of the steps by the run's seed; `make crash` takes all of them, and thirty kills at random
moments. What remains possible (docs/spark.md) is shown here as well.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate_client import Client
from spark.conftest import GROUP, SparkTopic, parquet_bodies
from spark.dying_sink import STEPS as SINK_STEPS
from spark.dying_source import STEPS
from spark.queries import SparkQuery
from spark.query_program import FILES_PER_BATCH
from support.processes import wait_until
from support.proxy import ProxyProcess

STEPS_SHORT = 1
KILLS_FULL = 30
BATCH = 100
PUBLISHED_PER_RUN = 300
SHORT_LEASE_SECONDS = 6
BATCHES_MAX, SECONDS_MAX = 3, 3.0


@pytest.fixture
def own_proxy(tmp_path: Path, java: None) -> Iterator[ProxyProcess]:
    """A proxy that the test may kill."""
    with ProxyProcess(tmp_path / "proxy", "--dedup-seconds", "3600") as proxy:
        yield proxy


@pytest.fixture
def own_topic(own_proxy: ProxyProcess) -> Iterator[SparkTopic]:
    with Client(own_proxy.url, retry_seconds_max=60) as client:
        yield SparkTopic(own_proxy.url, client)


@pytest.fixture
def lines(own_topic: SparkTopic, tmp_path: Path) -> "Lines":
    return Lines(tmp_path / "query", SparkTopic(own_topic.url, own_topic.client))


class Lines:
    """The lines of files that the second query of a driver publishes to a separate topic."""

    def __init__(self, folder: Path, topic: SparkTopic) -> None:
        self._folder = folder
        self._topic = topic
        self._count = 0
        (folder / "in").mkdir(parents=True)

    @property
    def options(self) -> dict[str, str]:
        return {"url": self._topic.url, "topic": self._topic.name}

    @property
    def next_batch(self) -> int:
        """The first batch that is not in Spark's commit log."""
        log = self._folder / "sink-checkpoint" / "commits"
        return max((int(one.name) for one in log.glob("[0-9]*")), default=-1) + 1

    def add_batches(self, count: int) -> None:
        """Add files; call this only while no driver runs."""
        for _ in range(count * FILES_PER_BATCH):
            numbers = range(self._count, self._count + BATCH)
            (self._folder / "in" / f"{self._count:06}").write_text("".join(f"l{number}\n" for number in numbers))
            self._count += BATCH

    def assert_each_published_once(self) -> None:
        assert sorted(one.text for one in self._topic.take_all()) == sorted(f"l{n}" for n in range(self._count))


def query(
    folder: Path, topic: SparkTopic, lines: Lines | None = None, *, trigger: str = "on", **options: object
) -> SparkQuery:
    given = {"maxMessagesPerBatch": BATCH, "partitions": 2, **topic.options, **options}
    return SparkQuery(folder / "query", given, trigger=trigger, sink=None if lines is None else lines.options)


def committed(folder: Path) -> list[str]:
    return parquet_bodies(folder / "query" / "out")


def is_in_the_sink(folder: Path, batch: int) -> bool:
    return (folder / "query" / "out" / "_spark_metadata" / f"{batch}").exists()


def newest(folder: Path) -> int:
    """Return the number of the sink's latest batch; -1 if it has none."""
    log = folder / "query" / "out" / "_spark_metadata"
    names = [one.name.removesuffix(".compact") for one in log.iterdir()] if log.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def wait_for_batch(folder: Path, number: int) -> None:
    wait_until(lambda: newest(folder) >= number, timeout_seconds=400, what=f"batch {number} in the sink")


def assert_each_once(folder: Path, topic: SparkTopic, published: int) -> None:
    """Check that the sink has every message once, and that none is left in the queues."""
    assert committed(folder) == sorted(f"m{number}" for number in range(published))
    assert topic.lease_groups() == []
    wait_until(lambda: topic.state()["in_flight"] == 0, timeout_seconds=20, what="no lease")
    assert topic.state()["ready"] == 0


@pytest.mark.crash
def test_each_message_is_in_the_sink_once_and_each_row_is_published_once_wherever_the_driver_is_killed(
    own_topic: SparkTopic, lines: Lines, tmp_path: Path, seed: int, full_run: bool
) -> None:
    chance = random.Random(seed)
    steps = list(STEPS) if full_run else chance.sample(STEPS, STEPS_SHORT)
    published = BATCH * (2 * len(steps) + 2)
    own_topic.publish_numbered(published)
    for number, step in enumerate(steps):
        lines.add_batches(2)  # this query is wherever it is when the other one dies
        # The epoch after the next one, so that a whole batch goes well in between. None is replayed under another.
        query(tmp_path, own_topic, lines).run_to_its_death(step, 2 * number + 2)
    for step in SINK_STEPS if full_run else chance.sample(SINK_STEPS, STEPS_SHORT):
        lines.add_batches(2)
        query(tmp_path, own_topic, lines).run_to_its_death(step, lines.next_batch + 1)
    query(tmp_path, own_topic, lines, trigger="now").run_to_its_end()
    assert_each_once(tmp_path, own_topic, published)
    lines.assert_each_published_once()


@pytest.mark.crash
def test_what_a_rival_takes_while_the_driver_is_down_is_in_the_sink_too_only_where_it_was_before(
    own_topic: SparkTopic, tmp_path: Path
) -> None:
    """The remaining case: the sink has the batch, its ack was not sent, the leases end, and a rival takes it."""
    published = own_topic.publish_numbered(4 * BATCH)
    driver = query(tmp_path, own_topic, invisibilitySeconds=SHORT_LEASE_SECONDS)
    driver.run_until(lambda: is_in_the_sink(tmp_path, 1), "batch 1 in the sink")
    before = committed(tmp_path)
    assert len(before) >= 2 * BATCH
    wait_until(lambda: own_topic.state()["in_flight"] == 0, timeout_seconds=30, what="the leases' end")
    rival = own_topic.client.pop(own_topic.name, GROUP, max_messages=BATCH // 2)
    own_topic.client.ack(own_topic.name, GROUP, rival)
    query(tmp_path, own_topic, trigger="now").run_to_its_end()
    rivals = {one.text for one in rival}
    in_sink = committed(tmp_path)
    assert len({*in_sink}) == len(in_sink), "the sink itself has nothing twice"
    assert {*in_sink} | rivals == {*published}, "nothing is lost"
    assert {*in_sink} & rivals == {*before} & rivals, "only what was in the sink by then is with both"


@pytest.mark.crash
def test_each_message_is_in_the_sink_once_over_kills_at_random(
    own_proxy: ProxyProcess, own_topic: SparkTopic, lines: Lines, tmp_path: Path, seed: int, full_run: bool
) -> None:
    """Of the driver with its JVM, of the proxy, and of a worker with its task; with leases that end soon in between."""
    if not full_run:
        pytest.skip("thirty kills take ten minutes: make crash")
    chance = random.Random(seed)
    published = 0
    told: list[str] = []
    for number in range(KILLS_FULL):
        own_topic.publish_numbered(PUBLISHED_PER_RUN, first=published)
        published += PUBLISHED_PER_RUN
        lines.add_batches(chance.randrange(1, BATCHES_MAX))
        seconds = chance.choice((SHORT_LEASE_SECONDS, 300))
        driver = query(tmp_path, own_topic, lines, invisibilitySeconds=seconds)
        driver.start()
        wanted = newest(tmp_path) + chance.randrange(BATCHES_MAX)  # batches are as slow as the machine is busy
        wait_for_batch(tmp_path, wanted)
        time.sleep(chance.uniform(0.0, SECONDS_MAX))
        victim = ("driver", "proxy", "worker")[number % 3]
        if victim == "proxy":
            own_proxy.kill()
            own_proxy.start()
            time.sleep(chance.uniform(0.0, SECONDS_MAX))
        elif victim == "worker":
            for worker in driver.workers("pyspark.worker"):
                worker.kill()
            time.sleep(chance.uniform(0.0, SECONDS_MAX))
        assert driver.is_running(), driver.failure("ended by itself")
        driver.kill()
        told.append(f"{victim} {len(committed(tmp_path))} of {published}")
    query(tmp_path, own_topic, lines, trigger="now").run_to_its_end()
    assert_each_once(tmp_path, own_topic, published)
    lines.assert_each_published_once()
    print(f"\n{KILLS_FULL} kills, {published} messages, each once; in the sink: {', '.join(told)}")  # noqa: T201
