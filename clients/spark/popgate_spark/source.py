"""The data source of the format "popgate": makes readers and writers from one set of options.

Spark creates it on the driver for each `load()` and each write, and pickles it. Does no I/O.
"""

import uuid
from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from popgate_spark.batch_reader import PopgateBatchReader
from popgate_spark.columns import SCHEMA
from popgate_spark.errors import SparkSourceError, told_in_one_line
from popgate_spark.options import Options
from popgate_spark.sink import PopgateBatchWriter, PopgateStreamWriter, RowPublisher
from popgate_spark.stream_reader import PopgateStreamReader, RefusedStreamReader

FORMAT = "popgate"


class PopgateDataSource(DataSource):
    """The data source. If Spark does not find it: `spark.dataSource.register(PopgateDataSource)` (docs/spark.md)."""

    def __init__(self, options: Mapping[str, str]) -> None:
        with told_in_one_line():
            self._options = Options(options)
        # All actions of one DataFrame share this id, and so read the same rows.
        self._unnamed_batch = f"unnamed-{uuid.uuid4().hex}"

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema. Spark calls this at each `load()`, so it also rejects invalid options."""
        with told_in_one_line():
            self._options.check_leased()
        return SCHEMA

    def reader(self, schema: StructType) -> PopgateBatchReader:
        with told_in_one_line():
            return PopgateBatchReader(self._options.batch(self._unnamed_batch), schema)

    def streamReader(self, schema: StructType) -> PopgateStreamReader:  # noqa: N802  # Spark's names, here and below
        try:
            return PopgateStreamReader(self._options.stream(), schema)
        except SparkSourceError as complaint:
            return RefusedStreamReader(complaint)

    def writer(self, schema: StructType, overwrite: bool) -> PopgateBatchWriter:
        with told_in_one_line():
            return PopgateBatchWriter(RowPublisher(self._options.sink(streaming=False), schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> PopgateStreamWriter:  # noqa: N802
        with told_in_one_line():
            return PopgateStreamWriter(RowPublisher(self._options.sink(streaming=True), schema, overwrite=overwrite))
