"""The streaming source with points at which its query is killed: `readStream.format("dying")`."""

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from popgate_spark.options import StreamOptions
from popgate_spark.slices import LeasedSlice
from popgate_spark.source import PopgateDataSource
from popgate_spark.stream_reader import PopgateStreamReader
from spark.death import Death

STEPS = ("before the ack", "acked", "leased", "planned", "read", "before the commit", "after the commit")
"""The steps, in their order, without those of the sink."""


class _HasOptions(Protocol):
    def stream(self) -> StreamOptions: ...


class DyingStreamReader(PopgateStreamReader):
    def __init__(self, options: StreamOptions, schema: StructType, death: Death) -> None:
        super().__init__(options, schema)
        self._death = death

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  # Spark's name
        following = start["epoch"] + 1
        self._death.may_come("before the ack", following)
        self.leases.ack({"stream": start["stream"], "epoch": start["epoch"]})
        self._death.may_come("acked", following)
        end = super().latestOffset(start, limit)
        if end != start:
            self._death.may_come("leased", following)
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        planned = super().partitions(start, end)
        self._death.may_come("planned", end["epoch"])
        return planned

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, LeasedSlice)
        for batch in super().read(partition):
            yield batch
            self._death.may_come("read", partition.epoch)

    def commit(self, end: dict[str, Any]) -> None:
        self._death.may_come("before the commit", end["epoch"])
        super().commit(end)
        self._death.may_come("after the commit", end["epoch"])


class DyingDataSource(PopgateDataSource):
    """The data source with one more option, `dieFolder`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._death = Death(Path(options["dieFolder"]))
        super().__init__({name: value for name, value in options.items() if name.lower() != "diefolder"})

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamReader(self, schema: StructType) -> PopgateStreamReader:  # noqa: N802  # Spark's name
        options: _HasOptions = self._options
        return DyingStreamReader(options.stream(), schema, self._death)
