"""`df.writeStream.format("popgate")` and `df.write.format("popgate")`: publish every row once, confirmed.

A task publishes its rows in requests of up to 256. Each row has a `dedup_id` that is the same when the task or the
batch is repeated: it comes from the query's id, the batch, the partition and the row's position, or from the column
`idColumn`. popgate remembers the ids for `--dedup-seconds`. Spark's commit has nothing left to do, and its abort can
undo nothing: the next attempt completes what this one began.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, NumericType, StringType, StructType

from popgate_client.errors import PopgateError
from popgate_client.message import OutgoingMessage, PublishResult
from popgate_spark.columns import SCHEMA
from popgate_spark.errors import NotPublished, OptionInvalid, SparkSourceError
from popgate_spark.options import SinkOptions
from popgate_spark.proxies import Proxies

BODY_COLUMNS = ("body", "value")
TEXT_COLUMNS = ("message_id", "ordering_key")
SECONDS_COLUMNS = ("delay_seconds", "ttl_seconds")
COLUMNS = (*BODY_COLUMNS, "headers", *TEXT_COLUMNS, *SECONDS_COLUMNS)
DEDUP_ID_LENGTH_MAX = 128
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True, slots=True)
class Published(WriterCommitMessage):
    """The result of one task. `duplicates`: rows that an earlier attempt had published."""

    published: int
    duplicates: int


class RowPublisher:
    """Publishes the rows of one task. Spark sends it to the executors."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrite: bool) -> None:
        """Raises: SparkSourceError for columns that can't be published."""
        if overwrite:
            raise SparkSourceError(
                'popgate: messages can only be added: use mode("append"), or outputMode("append") or "update"'
            )
        self._options = options
        self._body = _check_columns(schema, options.id_column)

    def publish(self, batches: Iterator[Any]) -> Published:
        """Publish all rows of a task. Raises: NotPublished."""
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        prefix = f"{self._write_id(context)}-{partition}"
        counts = {"published": 0, "duplicate": 0}
        first = 0
        with Proxies(self._options.place, first=partition) as proxies:
            for batch in batches:
                messages = self._messages(batch, prefix, first)
                results = self._send(proxies, messages, first)
                for result in results:
                    counts[result.status] += 1
                first += len(messages)
        return Published(counts["published"], counts["duplicate"])

    def _send(self, proxies: Proxies, messages: Sequence[OutgoingMessage], first: int) -> list[PublishResult]:
        try:
            results = proxies.perform(proxies.exchanges.publish(self._options.place.topic, messages))
        except PopgateError as error:
            rows = f"rows {first} to {first + len(messages) - 1}"
            raise NotPublished(f"popgate: none of {rows} of this task is known to be published: {error}") from None
        _check_results(messages, results, first)
        return results

    def _write_id(self, context: TaskContext | None) -> str:
        """Return the id of this write. In `foreachBatch` the batch's id is not enough: a second write in it would look
        like a repeat, and its rows would be skipped."""
        names = [self._options.write_id]
        if context is not None and (query := context.getLocalProperty(_QUERY_ID)):
            names = [query, str(context.getLocalProperty(_BATCH_ID)), *names]
        write_id = "-".join(name for name in names if name)
        assert write_id, "a streaming write has a query's id, any other one of its own"
        return write_id

    def _messages(self, batch: Any, prefix: str, first: int) -> list[OutgoingMessage]:
        columns: dict[str, list[Any]] = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        nothing: list[Any] = [None] * batch.num_rows
        bodies = columns[self._body]
        id_column = self._options.id_column
        ids = columns[id_column] if id_column else [f"{prefix}-{first + row}" for row in range(batch.num_rows)]
        messages: list[OutgoingMessage] = []
        for row in range(batch.num_rows):
            if bodies[row] is None:
                raise NotPublished(f"popgate: row {first + row} has no {self._body}; filter such rows out")
            if ids[row] is None:
                raise NotPublished(f"popgate: row {first + row} has no {id_column}, which idColumn names")
            headers = columns.get("headers", nothing)[row]
            messages.append(
                OutgoingMessage(
                    body=bodies[row],
                    headers=None if headers is None else dict(headers),
                    dedup_id=_dedup_id(str(ids[row])),
                    **{name: columns.get(name, nothing)[row] for name in (*TEXT_COLUMNS, *SECONDS_COLUMNS)},
                )
            )
        return messages


class PopgateStreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink."""

    def __init__(self, rows: RowPublisher) -> None:
        self._rows = rows

    def write(self, iterator: Iterator[Any]) -> Published:
        return self._rows.publish(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's
        """Do nothing: everything is already published."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: Spark writes the batch again."""


class PopgateBatchWriter(DataSourceArrowWriter):
    """The batch sink."""

    def __init__(self, rows: RowPublisher) -> None:
        self._rows = rows

    def write(self, iterator: Iterator[Any]) -> Published:
        return self._rows.publish(iterator)


def _check_columns(schema: StructType, id_column: str | None) -> str:
    """Return the name of the body's column. Raises: SparkSourceError."""
    names = schema.fieldNames()
    bodies = [name for name in BODY_COLUMNS if name in names]
    if len(bodies) != 1:
        raise SparkSourceError(f"popgate: exactly one column must be named body or value; there are {', '.join(names)}")
    if id_column is not None and id_column not in names:
        raise OptionInvalid("idColumn", f"there is no column {id_column}, only {', '.join(names)}")
    for field in schema:
        if field.name in COLUMNS:
            _check_type(field.name, field.dataType)
        elif field.name != id_column and field.name not in SCHEMA.fieldNames():
            raise SparkSourceError(
                f"popgate: column {field.name} can't be published; drop it, or put it into headers. Known are "
                f"{', '.join(COLUMNS)}"
            )
    return bodies[0]


def _check_type(name: str, kind: DataType) -> None:
    if name in BODY_COLUMNS:
        is_right, wanted = isinstance(kind, StringType | BinaryType), "string or binary"
    elif name in TEXT_COLUMNS:
        is_right, wanted = isinstance(kind, StringType), "string"
    elif name in SECONDS_COLUMNS:
        is_right, wanted = isinstance(kind, NumericType), "a number"
    else:
        is_right, wanted = kind.simpleString() == "map<string,string>", "map<string,string>"
    if not is_right:
        raise SparkSourceError(f"popgate: column {name} must be {wanted}, not {kind.simpleString()}; cast it")


def _check_results(messages: Sequence[OutgoingMessage], results: Sequence[PublishResult], first: int) -> None:
    failed = [(row, result) for row, result in enumerate(results) if not result.ok]
    if failed:
        row, result = failed[0]
        error = result.error or {}
        raise NotPublished(
            f"popgate: {len(failed)} of {len(messages)} messages were not published; the first is row {first + row} "
            f"(message_id {messages[row].message_id}): {error.get('detail', '')} ({error.get('code', result.status)})"
        )


def _dedup_id(text: str) -> str:
    return text if 0 < len(text) <= DEDUP_ID_LENGTH_MAX else hashlib.sha256(text.encode()).hexdigest()
