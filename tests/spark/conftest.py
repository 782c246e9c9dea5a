"""Fixtures of the tests of the Spark source, reader and sink: a proxy, and a separate topic for each test."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from popgate_client import Client, OutgoingMessage
from support.processes import wait_until
from support.proxy import ProxyProcess

PATIENCE_SECONDS = 20.0
GROUP = "lake"


class SparkTopic:
    """One topic with its group `lake`, on one proxy."""

    def __init__(self, url: str, client: Client) -> None:
        self.url = url
        self.client = client
        self.name = f"t-{secrets.token_hex(4)}"
        client.put_topic(self.name, queues=2)
        client.put_group(self.name, GROUP)

    @property
    def options(self) -> dict[str, str]:
        """The mandatory options of a reader."""
        return {"url": self.url, "topic": self.name, "group": GROUP}

    def publish(self, *messages: str | OutgoingMessage) -> None:
        """Publish messages, and return when all can be leased."""
        before = self.state()["ready"]
        assert all(result.ok for result in self.client.publish(self.name, *messages))
        wait_until(
            lambda: self.state()["ready"] >= before + len(messages), timeout_seconds=PATIENCE_SECONDS, what="messages"
        )

    def publish_numbered(self, count: int, first: int = 0) -> list[str]:
        bodies = [f"m{number}" for number in range(first, first + count)]
        self.publish(*bodies)
        return bodies

    def state(self) -> dict[str, Any]:
        return self.client.stats(self.name, GROUP)

    def lease_groups(self) -> list[dict[str, Any]]:
        return self.client.lease_groups(self.name, GROUP)

    def take_all(self) -> list[Any]:
        """Pop and ack all ready messages."""
        taken: list[Any] = []
        while messages := self.client.pop(self.name, GROUP, max_messages=256, wait_seconds=1):
            self.client.ack(self.name, GROUP, messages)
            taken += messages
        return taken


@pytest.fixture(scope="session")
def spark_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("spark-proxy")) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def spark_client(spark_proxy: ProxyProcess) -> Iterator[Client]:
    with Client(spark_proxy.url) as client:
        yield client


@pytest.fixture
def topic(spark_proxy: ProxyProcess, spark_client: Client) -> SparkTopic:
    return SparkTopic(spark_proxy.url, spark_client)


@pytest.fixture
def new_topic(spark_proxy: ProxyProcess, spark_client: Client) -> Callable[[], SparkTopic]:
    """For tests with more than one topic."""
    return lambda: SparkTopic(spark_proxy.url, spark_client)


def bodies_of(rows: Sequence[Any]) -> list[str]:
    """Return the bodies of rows, sorted."""
    return sorted(bytes(row["body"]).decode() for row in rows)


def parquet_bodies(folder: Path) -> list[str]:
    """Return the sorted content of a file sink's committed files: those in its log, as Spark reads them."""
    import json
    from importlib import import_module

    parquet: Any = import_module("pyarrow.parquet")  # it has no type stubs
    files = {
        json.loads(line)["path"].removeprefix("file://")
        for log in (folder / "_spark_metadata").glob("[0-9]*")
        for line in log.read_text().splitlines()[1:]
    }
    bodies: list[str] = []
    for file in sorted(files):
        bodies += [body.decode() for body in parquet.ParquetFile(file).read(columns=["body"])["body"].to_pylist()]
    return sorted(bodies)
