"""`spark.readStream.format("popgate")`: the calls of Spark's streaming reader.

One instance lives in the driver's long-lived Python process and gets every call but `read`; another one is pickled to
the executors and gets only that. What belongs to the driver is in `leasing`, made at its first use.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from popgate_client.errors import RetryLater
from popgate_spark.columns import check_schema
from popgate_spark.errors import SparkSourceError, told_in_one_line
from popgate_spark.leasing import START, BatchLeases, Offset
from popgate_spark.options import StreamOptions
from popgate_spark.slices import LeasedSlice, SliceReader


class PopgateStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Exactly once into a sink that keeps each batch once (docs/spark.md has the windows that remain)."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._slices = SliceReader(options=options.leased, schema=schema)
        self._leases: BatchLeases | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_leases": None}

    @property
    def leases(self) -> BatchLeases:
        """Made in the process that asks for it."""
        if self._leases is None:
            self._leases = BatchLeases(self._options)
        return self._leases

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's names, here and below
        return ReadMaxRows(self._options.leased.messages_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Drain what is ready at this moment."""
        with told_in_one_line():
            self.leases.limit_to_what_is_there()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """A constant: Spark asks again when it replays the first batch."""
        return {**START}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Spark's commit log has `start`, so that everything through it may be acked; then lease the next batch."""
        with told_in_one_line():
            self.leases.ack(_offset(start))
            rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.leased.messages_max
            return {**self.leases.lease(_offset(start), min(rows_max, self._options.leased.messages_max))}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One slice a task. Also called for a batch that is replayed, for which `latestOffset` was not."""
        if start == end:
            return []
        with told_in_one_line():
            offset = _offset(end)
            batch = self.leases.plan(offset)
        return [
            LeasedSlice(stream=offset["stream"], epoch=offset["epoch"], number=number, lost=batch.lost)
            for number in range(batch.slices)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """On an executor. Changes nothing, and gives the same rows to every attempt of the task."""
        assert isinstance(partition, LeasedSlice)
        return self._slices.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """A second chance to ack: `latestOffset` does what fails here."""
        with told_in_one_line():
            try:
                self.leases.ack(_offset(end))
            except RetryLater:
                return

    def stop(self) -> None:
        """Nothing is released: the batch that Spark has planned must be found again."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.close()


class RefusedStreamReader(PopgateStreamReader):
    """Says what is wrong at Spark's first call: what a source raises before that, Spark 4.2 and 4.3 lose."""

    def __init__(self, complaint: SparkSourceError) -> None:
        self._complaint = complaint
        self._leases = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._refuse()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return self._refuse()

    def commit(self, end: dict[str, Any]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        with told_in_one_line():
            raise self._complaint


def _offset(read: Mapping[str, Any]) -> Offset:
    return {"stream": str(read["stream"]), "epoch": int(read["epoch"])}
