"""Where a job lays down what it has computed, so that Spark neither computes nor plans it twice.

Parquet below the output folder, in place of Spark's cache: it needs no memory, and what is read from it has no past. It
goes when the job ends, and what a killed job left goes when the next one begins.
"""

from types import TracebackType
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from popgate_spark.storage import remove

FOLDER = "_work"


class Workplace:
    """Of one run of a job, below its output folder."""

    def __init__(self, spark: SparkSession, output: str) -> None:
        self._spark = spark
        self._folder = f"{output.rstrip('/')}/{FOLDER}"

    def kept(self, name: str, table: DataFrame, *, files: int | None = None) -> DataFrame:
        """Compute a table now and lay it down; returns what reads it. `files`: so many at most, for small ones."""
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
