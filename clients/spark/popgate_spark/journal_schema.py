"""The journal's columns, as the proxy writes them and Spark reads them: one versioned table.

Owns names, types and nullability; the proxy's writer has the same table, and a contract test compares the two. An added
or removed column, or one with another meaning, needs a new version. Files are `date=YYYY-MM-DD/hour=HH/*.parquet` (UTC,
the hour of `at`), and each has its version in its footer.
"""

from typing import NamedTuple

from pyspark.sql.types import (
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

VERSION = 1
VERSION_KEY = "popgate.journal.version"
"""Key in a file's metadata; its value is the version in decimal."""


class Column(NamedTuple):
    name: str
    type: str
    """The Arrow type, as its `str` returns it."""
    nullable: bool


COLUMNS: tuple[Column, ...] = (
    Column("at", "timestamp[us, tz=UTC]", False),
    Column("event", "string", False),
    Column("topic", "string", True),
    Column("group", "string", True),
    Column("queue", "int32", True),
    Column("copy_id", "string", True),
    Column("message_id", "string", True),
    Column("ordering_key", "string", True),
    Column("delivery_count", "int32", True),
    Column("client", "string", True),
    Column("proxy", "string", False),
    Column("published_at", "timestamp[us, tz=UTC]", True),
    Column("visible_at", "timestamp[us, tz=UTC]", True),
    Column("held_seconds", "double", True),
    Column("invisibility_seconds", "double", True),
    Column("size_bytes", "int32", True),
    Column("groups", "string", True),
    Column("new_copy_id", "string", True),
    Column("detail", "string", True),
    Column("journal_seq", "int64", False),
)
"""The columns in the order of the files."""

_IN_SPARK: dict[str, DataType] = {
    "timestamp[us, tz=UTC]": TimestampType(),
    "string": StringType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "double": DoubleType(),
}

SPARK_SCHEMA = StructType([StructField(one.name, _IN_SPARK[one.type], one.nullable) for one in COLUMNS])
PARTITIONS = StructType([StructField("date", StringType()), StructField("hour", IntegerType())])
"""Columns that appear only in the names of the folders."""
