"""The Spark session of the tests: what the other tests here rely on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_python_runs_in_sparks_workers_and_times_are_utc(spark: "SparkSession") -> None:
    squares = spark.sparkContext.parallelize(range(4), 2).map(lambda number: number * number)
    assert squares.collect() == [0, 1, 4, 9]
    row = spark.sql("SELECT timestamp_seconds(0) AS epoch, current_timezone() AS zone").collect()[0]
    assert (str(row["epoch"]), row["zone"]) == ("1970-01-01 00:00:00", "UTC")
