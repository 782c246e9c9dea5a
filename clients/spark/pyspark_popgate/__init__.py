"""Lets Spark find the format "popgate" without registering it: Spark looks for `DefaultSource` in every top-level
module `pyspark_*` that the driver's Python can import."""

from popgate_spark.source import PopgateDataSource as DefaultSource

__all__ = ["DefaultSource"]
