"""`spark.readStream.format("popgate")`: implements Spark's streaming reader.

One instance lives in the driver's long-lived Python process and gets every call except `read`; another is pickled to
the executors and gets only `read`. `leasing` has the driver's part, which is created at first use.
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
    """Delivers exactly once into a sink that keeps each batch once (docs/spark.md lists the exceptions)."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._slices = SliceReader(options=options.leased, schema=schema)
        self._leases: BatchLeases | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_leases": None}

    @property
    def leases(self) -> BatchLeases:
        """The driver's leases, created in the process that uses them."""
        if self._leases is None:
            self._leases = BatchLeases(self._options)
        return self._leases

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's names, here and below
        return ReadMaxRows(self._options.leased.messages_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read only the messages that are ready now."""
        with told_in_one_line():
            self.leases.limit_to_what_is_there()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return a constant, because Spark asks again when it replays the first batch."""
        return {**START}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Ack everything through `start`, which Spark's commit log has by now; then lease the next batch."""
        with told_in_one_line():
            self.leases.ack(_offset(start))
            rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.leased.messages_max
            return {**self.leases.lease(_offset(start), min(rows_max, self._options.leased.messages_max))}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return one slice per task. Also called for a replayed batch, without a call of `latestOffset`."""
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
        """Read a slice on an executor: the same rows for every attempt of the task."""
        assert isinstance(partition, LeasedSlice)
        return self._slices.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Ack the batch. If this fails, `latestOffset` does it later."""
        with told_in_one_line():
            try:
                self.leases.ack(_offset(end))
            except RetryLater:
                return

    def stop(self) -> None:
        """Close connections. Nothing is released: a batch that Spark has planned must be found again."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.close()


class RefusedStreamReader(PopgateStreamReader):
    """Raises an error of the options at Spark's first call, because Spark 4.2 and 4.3 lose an earlier one."""

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
