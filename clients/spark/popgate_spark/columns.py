"""The columns of the source and the reader; turns a slice's Arrow stream into record batches of exactly this schema.

Header values have JSON's types on the wire. In the `headers` column they are strings: strings unchanged, numbers and
booleans as JSON writes them, null as null.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.ipc as untyped_ipc  # type: ignore[import-untyped]  # it has no stubs
from pyspark.sql.pandas import types as pandas_types
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from popgate_spark.errors import SparkSourceError

pyarrow: Any = pa
ipc: Any = untyped_ipc
spark_arrow: Any = pandas_types  # it speaks of pyarrow's types

BATCH_ROWS_MAX = 10_000
"""Maximum rows of one record batch passed to Spark."""
SCHEMA = StructType(
    [
        StructField("message_id", StringType()),
        StructField("body", BinaryType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("ordering_key", StringType()),
        StructField("queue", IntegerType()),
        StructField("delivery_count", IntegerType()),
        StructField("published_at", TimestampType()),
        StructField("first_delivered_at", TimestampType()),
        StructField("position", LongType()),
    ]
)


def check_schema(wanted: StructType) -> None:
    """Check a user's schema, which may leave columns out. Raises: SparkSourceError for an unknown column or type."""
    types = {field.name: field.dataType for field in SCHEMA}
    for field in wanted:
        if types.get(field.name) != field.dataType:
            there_are = ", ".join(f"{name} {kind.simpleString()}" for name, kind in types.items())
            raise SparkSourceError(
                f"popgate: the schema's column {field.name} {field.dataType.simpleString()} is not one of the source's "
                f"({there_are}); leave out .schema(...), or cast in a select"
            )


def record_batches(content: bytes, wanted: StructType) -> Iterator[Any]:
    """Return the rows of one slice with the columns that Spark requests."""
    schema = spark_arrow.to_arrow_schema(wanted, timezone="UTC")
    table = ipc.open_stream(content).read_all()
    columns = [
        _headers(table[field.name], field.type) if field.name == "headers" else table[field.name].cast(field.type)
        for field in schema
    ]
    yield from pyarrow.table(columns, schema=schema).combine_chunks().to_batches(max_chunksize=BATCH_ROWS_MAX)


def _headers(texts: Any, kind: Any) -> Any:
    """Decode headers. Most messages have the same headers, or none, so each distinct text is parsed once."""
    encoded = texts.combine_chunks().dictionary_encode()
    if isinstance(encoded, pyarrow.ChunkedArray):
        encoded = encoded.combine_chunks()
    maps = [
        [(name, _text(value)) for name, value in json.loads(text).items()] for text in encoded.dictionary.to_pylist()
    ]
    return pyarrow.array(maps, kind).take(encoded.indices)


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
