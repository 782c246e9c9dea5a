"""Converts recorded events to Arrow record batches, and record batches to the bytes of a Parquet file.

This module owns the schema of the files, version 1 (docs/journal.md). ``popgate_spark.journal_schema`` contains the
same schema for readers. If a column is added, removed or redefined, the version must change.

While Python code runs on the writer's thread, the event loop must wait. So Arrow does nearly all the work: it releases
Python's global interpreter lock meanwhile. A call contains some values only once for all its events. Arrow repeats
these values (``compute.run_end_decode``), so that no Python code iterates over rows.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.arrow import Array, RecordBatch, compute, parquet, pyarrow
from popgate.adapters.journal_parquet.columns import COUNT, SECONDS, TEXT, row_columns
from popgate.adapters.journal_parquet.rows import WIDTH
from popgate.domain.names import CopyId, GroupName, TopicName
from popgate.ports.journal import TOPIC_EVENTS, EventKind

VERSION = 1
VERSION_KEY = "popgate.journal.version"

_INSTANT = pyarrow.timestamp("us", tz="UTC")
SCHEMA = pyarrow.schema(
    [
        pyarrow.field("at", _INSTANT, nullable=False),
        pyarrow.field("event", TEXT, nullable=False),
        pyarrow.field("topic", TEXT),
        pyarrow.field("group", TEXT),
        pyarrow.field("queue", COUNT),
        pyarrow.field("copy_id", TEXT),
        pyarrow.field("message_id", TEXT),
        pyarrow.field("ordering_key", TEXT),
        pyarrow.field("delivery_count", COUNT),
        pyarrow.field("client", TEXT),
        pyarrow.field("proxy", TEXT, nullable=False),
        pyarrow.field("published_at", _INSTANT),
        pyarrow.field("visible_at", _INSTANT),
        pyarrow.field("held_seconds", SECONDS),
        pyarrow.field("invisibility_seconds", SECONDS),
        pyarrow.field("size_bytes", COUNT),
        pyarrow.field("groups", TEXT),
        pyarrow.field("new_copy_id", TEXT),
        pyarrow.field("detail", TEXT),
        pyarrow.field("journal_seq", pyarrow.int64(), nullable=False),
    ],
    metadata={VERSION_KEY: str(VERSION)},
)

_NAME = pyarrow.dictionary(pyarrow.int32(), TEXT)
_WRITTEN = pyarrow.schema(
    [field.with_type(_NAME) if field.name in {"event", "topic", "group", "proxy"} else field for field in SCHEMA]
)
"""The schema of the record batches that are written. Columns with few distinct values have a dictionary type, because
Parquet also stores them as dictionaries."""

HELD_UNTIL = frozenset({EventKind.ACKED, EventKind.RELEASED, EventKind.EXTENDED, EventKind.EXPIRED, EventKind.REJECTED})
"""Events with ``held_seconds``: the time since the message was leased."""
LEASED_FOR = frozenset({EventKind.DELIVERED, EventKind.ACKED, EventKind.RELEASED, EventKind.EXPIRED})
"""Events with ``invisibility_seconds``: the length of the lease when it was granted."""
_HELD_UNTIL, _LEASED_FOR, _TOPIC_EVENTS = (
    pyarrow.array(kinds, TEXT) for kinds in (HELD_UNTIL, LEASED_FOR, TOPIC_EVENTS)
)

RISING_COLUMNS = ("journal_seq", "at", "published_at", "visible_at")
"""Columns that are written as differences between rows, because their values usually increase from row to row."""
UNLIKE_COLUMNS = frozenset({*RISING_COLUMNS, "held_seconds", "new_copy_id"})
"""Columns that are written without a dictionary, because their values rarely repeat."""
DICTIONARY_BYTES_MAX = 8 << 20
"""Maximum size of the dictionary of a column, in bytes. It is large enough for the copy ids of a file. A copy id
repeats in each event of its message."""
FILTERED_COLUMNS = ("at", "topic", "group", "journal_seq")
"""Columns that are written with statistics. Readers use the statistics to skip parts of a file."""
WRITTEN_AT_ONCE = 65_536
"""Number of values of a column in one write to the Parquet encoder. Each write has a fixed cost."""
_DICTIONARIES = [name for name in SCHEMA.names if name not in UNLIKE_COLUMNS]
_NO_SECONDS, _NO_TEXT = pyarrow.scalar(None, SECONDS), pyarrow.scalar(None, TEXT)
_INSTANT_SECONDS_MAX = 253_402_300_800.0
"""The start of the year 10,000, in Unix seconds. Readers don't support later times, but other applications may publish
messages with any timestamp."""


class Call(NamedTuple):
    """Events that one call of the journal port recorded.

    From ``first_value`` on, ``values`` contains ``WIDTH`` values for each event, one event after another. Several calls
    share this list, and values are only appended to it. Some calls also share rows. ``details`` and ``new_copy_ids``
    contain one value for each event, or are empty.
    """

    first_seq: int
    kind: EventKind
    topic: TopicName | None
    group: GroupName | None
    at: float
    event_count: int
    values: list[Any]
    first_value: int
    details: Sequence[str]
    new_copy_ids: Sequence[CopyId]
    receivers: Sequence[GroupName]


def batch_of(calls: Sequence[Call], proxy: str) -> RecordBatch:
    """Return a record batch with one row for each event of ``calls``, in order."""
    first_seqs, kinds, topics, groups, ats, counts, *_, details, new_copy_ids, receivers = zip(*calls, strict=True)
    kinds, counts = pyarrow.array(kinds, TEXT), pyarrow.array(counts, pyarrow.int32())
    ends = compute.cumulative_sum(counts)
    count = ends[-1].as_py()

    def repeated(values: Array) -> Array:
        return compute.run_end_decode(pyarrow.RunEndEncodedArray.from_arrays(ends, values))

    def names(values: Array) -> Array:
        encoded = values.dictionary_encode()
        return pyarrow.DictionaryArray.from_arrays(repeated(encoded.indices), encoded.dictionary)

    def is_one_of(some: Array) -> Array:
        return repeated(compute.is_in(kinds, some))

    rows, first_rows = row_columns([(call.values, call.first_value, call.event_count) for call in calls])
    starts, places = compute.subtract(ends, counts), pyarrow.arange(0, count)

    def counted_from(firsts: Sequence[int]) -> Array:
        return compute.add(repeated(compute.subtract(pyarrow.array(firsts, pyarrow.int64()), starts)), places)

    row_numbers = counted_from(first_rows)

    def of_events(column: Array) -> Array:
        return column if len(column) == count else column.take(row_numbers)

    at, leased_at = repeated(pyarrow.array(ats, SECONDS)), of_events(rows.leased_at)
    is_held = compute.and_(is_one_of(_HELD_UNTIL), compute.greater(leased_at, 0.0))
    held_seconds = compute.max_element_wise(compute.subtract(at, leased_at), 0.0)
    lease_seconds = of_events(_positive(rows.invisibility_seconds))
    published_at = _believable(rows.published_at)
    visible_at = compute.coalesce(_believable(rows.visible_at), published_at)
    return pyarrow.RecordBatch.from_arrays(
        [
            _instants(at),
            names(kinds),
            names(pyarrow.array(topics, TEXT)),
            names(compute.if_else(compute.is_in(kinds, _TOPIC_EVENTS), _NO_TEXT, pyarrow.array(groups, TEXT))),
            of_events(rows.queue),
            of_events(rows.copy_id),
            of_events(rows.message_id),
            of_events(rows.ordering_key),
            of_events(_positive(rows.delivery_count)),
            of_events(rows.client),
            pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), count), [proxy]),
            of_events(_instants(published_at)),
            of_events(_instants(visible_at)),
            compute.if_else(is_held, held_seconds, _NO_SECONDS),
            compute.if_else(is_one_of(_LEASED_FOR), lease_seconds, _NO_SECONDS),
            of_events(rows.size_bytes),
            repeated(pyarrow.array([",".join(sorted(some)) if some else None for some in receivers], TEXT)),
            _texts(new_copy_ids, calls, count),
            _texts(details, calls, count),
            counted_from(first_seqs),
        ],
        schema=_WRITTEN,
    )


def readable(call: Call) -> Call:
    """Return ``call`` with valid texts.

    Characters that can't be encoded (such as half a surrogate pair) are replaced.
    """
    values = call.values[call.first_value : call.first_value + WIDTH * call.event_count]
    return call._replace(
        values=[_whole_text(value) if isinstance(value, str) else value for value in values],
        first_value=0,
        details=[_whole_text(text) for text in call.details],
    )


def _whole_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _positive(numbers: Array) -> Array:
    """Return ``numbers`` with null in place of 0, because 0 means unknown."""
    return compute.if_else(compute.greater(numbers, 0), numbers, pyarrow.scalar(None, numbers.type))


def _believable(seconds: Array) -> Array:
    """Return ``seconds`` with null in place of values that are not positive or that are later than readers support."""
    is_time = compute.and_(compute.greater(seconds, 0.0), compute.less(seconds, _INSTANT_SECONDS_MAX))
    return compute.if_else(is_time, seconds, _NO_SECONDS)


def _instants(seconds: Array) -> Array:
    rounded = compute.floor(compute.add(compute.multiply(seconds, 1e6), 0.5))  # three times as fast as compute.round
    return rounded.cast(pyarrow.int64()).cast(_INSTANT)


def _texts(given: Sequence[Sequence[str]], calls: Sequence[Call], count: int) -> Array:
    """Return a text column from ``given``, which contains the texts of each call, or is empty for most calls.

    The rows of a call without texts, and empty texts, become null.
    """
    if not any(given):
        return pyarrow.nulls(count, TEXT)
    texts = (one or (None,) * call.event_count for one, call in zip(given, calls, strict=True))
    return pyarrow.array([text or None for text in chain.from_iterable(texts)], TEXT)


def parquet_of(batches: Sequence[RecordBatch]) -> memoryview:
    """Return the bytes of a Parquet file that contains ``batches``."""
    sink = pyarrow.BufferOutputStream()
    with parquet.ParquetWriter(
        sink,
        _WRITTEN,
        store_schema=False,  # otherwise readers would read dictionaries instead of texts
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
        write_statistics=FILTERED_COLUMNS,
        write_batch_size=WRITTEN_AT_ONCE,
        column_encoding=dict.fromkeys(RISING_COLUMNS, "DELTA_BINARY_PACKED"),
    ) as writer:
        writer.write_table(pyarrow.Table.from_batches(batches, _WRITTEN).unify_dictionaries())
        writer.add_key_value_metadata(SCHEMA.metadata)
    return memoryview(sink.getvalue())
