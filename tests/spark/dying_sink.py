"""The streaming sink with points at which its query is killed: `writeStream.format("dying-sink")`."""

import random
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from popgate_client.message import OutgoingMessage, PublishResult
from popgate_spark.options import SinkOptions
from popgate_spark.proxies import Proxies
from popgate_spark.sink import PopgateStreamWriter, Published, RowPublisher
from popgate_spark.source import PopgateDataSource
from spark.death import Death

STEPS = ("task begun", "request on its way", "request answered", "task ended", "all tasks ended")
"""The steps, in their order. After the last one Spark records that the batch is done."""
ANSWER_SECONDS_MAX = 0.01


class DyingPublisher(RowPublisher):
    def __init__(self, options: SinkOptions, schema: StructType, death: Death) -> None:
        super().__init__(options, schema, overwrite=False)
        self._death = death

    def publish(self, batches: Iterator[Any]) -> Published:
        self._death.may_come("task begun", _batch())
        published = super().publish(batches)
        self._death.may_come("task ended", _batch())
        return published

    def _send(self, proxies: Proxies, messages: Sequence[OutgoingMessage], first: int) -> list[PublishResult]:
        if self._death.takes_order("request on its way", _batch()):
            # This worker goes on for as long as its JVM takes to die: the next driver may meet what it publishes.
            threading.Timer(random.Random(first).uniform(0.0, ANSWER_SECONDS_MAX), self._death.come).start()
        results = super()._send(proxies, messages, first)
        self._death.may_come("request answered", _batch())
        return results


class DyingStreamWriter(PopgateStreamWriter):
    def __init__(self, rows: DyingPublisher, death: Death) -> None:
        super().__init__(rows)
        self._death = death

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        super().commit(messages, batchId)
        self._death.may_come("all tasks ended", batchId)


class _HasOptions(Protocol):
    def sink(self, *, streaming: bool) -> SinkOptions: ...


class DyingDataSink(PopgateDataSource):
    """The data source with one more option, `dieFolder`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._death = Death(Path(options["dieFolder"]))
        super().__init__({name: value for name, value in options.items() if name.lower() != "diefolder"})

    @classmethod
    def name(cls) -> str:
        return "dying-sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> PopgateStreamWriter:  # noqa: N802  # Spark's name
        options: _HasOptions = self._options
        return DyingStreamWriter(DyingPublisher(options.sink(streaming=True), schema, self._death), self._death)


def _batch() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty("streaming.sql.batchId") or -1)
