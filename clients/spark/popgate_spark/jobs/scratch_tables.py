"""Stores the intermediate results of a job, so that Spark neither computes nor plans them twice.

They are Parquet files below the output folder, in place of Spark's cache: they need no memory, and a table that is read
from them has no lineage. They are removed when the job ends; those of a killed job, when the next one begins.
"""

from types import TracebackType
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from popgate_spark.storage import remove

FOLDER = "_work"


class ScratchTables:
    """The intermediate results of one run of a job, below its output folder."""

    def __init__(self, spark: SparkSession, output: str) -> None:
        self._spark = spark
        self._folder = f"{output.rstrip('/')}/{FOLDER}"

    def kept(self, name: str, table: DataFrame, *, files: int | None = None) -> DataFrame:
        """Compute and store a table now; return a table that reads it. `files`: maximum number of files, for small
        tables."""
        place = f"{self._folder}/{name}"
        (table.repartition(files) if files is not None else table).write.mode("overwrite").parquet(place)
        return self._spark.read.schema(table.schema).parquet(place)

    def __enter__(self) -> Self:
        remove(self._spark, self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self._spark, self._folder)
