"""A cluster with separate executor processes (`local-cluster`): two of them, one of which is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark.conftest import SparkTopic, parquet_bodies
from spark.queries import SparkQuery
from support.processes import wait_until

MASTER = "local-cluster[2,1,1024]"
EXECUTOR = "CoarseGrainedExecutorBackend"
MESSAGES, BATCH = 1_000, 100


@pytest.fixture
def cluster_query(topic: SparkTopic, tmp_path: Path, java: None) -> Iterator[SparkQuery]:
    options = {**topic.options, "maxMessagesPerBatch": BATCH, "partitions": 2}
    with_end = SparkQuery(tmp_path, options, trigger="now", master=MASTER)
    yield with_end
    with_end.close()


@pytest.mark.crash
def test_executors_of_their_own_read_and_one_that_is_killed_loses_and_doubles_nothing(
    cluster_query: SparkQuery, topic: SparkTopic, tmp_path: Path
) -> None:
    published = topic.publish_numbered(MESSAGES)
    cluster_query.launch()
    log = tmp_path / "out" / "_spark_metadata"
    wait_until(
        lambda: (log / "1").exists() or not cluster_query.is_running(), timeout_seconds=180, what="batch 1 in the sink"
    )
    executors = {process.pid for process in cluster_query.workers(EXECUTOR) if process.name() == "java"}
    assert len(executors) == 2, cluster_query.failure("has other executors")
    os.kill(min(executors), signal.SIGKILL)
    assert not (log / f"{MESSAGES // BATCH - 1}").exists(), "it was killed at work"
    assert cluster_query.wait(180) == 0, cluster_query.failure("failed")
    assert parquet_bodies(tmp_path / "out") == sorted(published)
    assert topic.lease_groups() == []
