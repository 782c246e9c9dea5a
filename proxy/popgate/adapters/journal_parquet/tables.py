"""From what the engine has reported to Arrow, and to the bytes of a Parquet file.

Owns the schema, version 1 (docs/journal.md). Readers have the same table (``popgate_spark.journal_schema``); a column
more, fewer or of another meaning is another version.

Nearly all of it is done by Arrow, which lets go of the interpreter meanwhile: what Python does an event is on the event
loop's account. So values that a call has once are repeated there (``pc.run_end_decode``), and nothing walks over rows.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.arrow import Array, RecordBatch, compute, parquet, pyarrow
from popgate.adapters.journal_parquet.rows import WIDTH
from popgate.domain.names import CopyId, GroupName, TopicName
from popgate.ports.journal import OF_TOPICS, EventKind

VERSION = 1
VERSION_KEY = "popgate.journal.version"

_INSTANT = pyarrow.timestamp("us", tz="UTC")
_TEXT, _COUNT, _SECONDS = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
SCHEMA = pyarrow.schema(
    [
        pyarrow.field("at", _INSTANT, nullable=False),
        pyarrow.field("event", _TEXT, nullable=False),
        pyarrow.field("topic", _TEXT),
        pyarrow.field("group", _TEXT),
        pyarrow.field("queue", _COUNT),
        pyarrow.field("copy_id", _TEXT),
        pyarrow.field("message_id", _TEXT),
        pyarrow.field("ordering_key", _TEXT),
        pyarrow.field("delivery_count", _COUNT),
        pyarrow.field("client", _TEXT),
        pyarrow.field("proxy", _TEXT, nullable=False),
        pyarrow.field("published_at", _INSTANT),
        pyarrow.field("visible_at", _INSTANT),
        pyarrow.field("held_seconds", _SECONDS),
        pyarrow.field("invisibility_seconds", _SECONDS),
        pyarrow.field("size_bytes", _COUNT),
        pyarrow.field("groups", _TEXT),
        pyarrow.field("new_copy_id", _TEXT),
        pyarrow.field("detail", _TEXT),
        pyarrow.field("journal_seq", pyarrow.int64(), nullable=False),
    ],
    metadata={VERSION_KEY: str(VERSION)},
)

_NAME = pyarrow.dictionary(pyarrow.int32(), _TEXT)
_WRITTEN = pyarrow.schema(
    [field.with_type(_NAME) if field.name in {"event", "topic", "group", "proxy"} else field for field in SCHEMA]
)
"""What is alike for many rows is handed to Parquet as what it will be there."""

ROW_TYPES = (
    _TEXT,  # copy_id
    _COUNT,  # queue
    _COUNT,  # delivery_count; 0: never handed out
    _SECONDS,  # leased_at; 0.0: not known
    _TEXT,  # client
    _SECONDS,  # invisibility_seconds; 0.0: not known
    _TEXT,  # message_id
    _TEXT,  # ordering_key
    _SECONDS,  # published_at; 0.0: not known
    _SECONDS,  # visible_at; None: at once
    _COUNT,  # size_bytes
)
"""The values of one subject, in order (``rows``)."""

_FORMATS = {_COUNT: "i", _SECONDS: "d"}
_SEPARATOR = "\0"
"""No id is expected to have it. Where one does it is only slower."""

HELD_UNTIL = frozenset({EventKind.ACKED, EventKind.RELEASED, EventKind.EXTENDED, EventKind.EXPIRED, EventKind.REJECTED})
"""Events that say how long a message was held."""
LEASED_FOR = frozenset({EventKind.DELIVERED, EventKind.ACKED, EventKind.RELEASED, EventKind.EXPIRED})
"""Events that say for how long its lease was given."""
_HELD_UNTIL, _LEASED_FOR, _OF_TOPICS = (pyarrow.array(kinds, _TEXT) for kinds in (HELD_UNTIL, LEASED_FOR, OF_TOPICS))

RISING_COLUMNS = ("journal_seq", "at", "published_at", "visible_at")
"""Written as differences: they rise, or nearly."""
UNLIKE_COLUMNS = frozenset({*RISING_COLUMNS, "held_seconds", "new_copy_id"})
"""Hardly any value comes twice: a dictionary would only cost."""
DICTIONARY_BYTES_MAX = 8 << 20
"""The copy ids of a whole file: each comes once for every event of its message."""
FILTERED_COLUMNS = ("at", "event", "topic", "group", "journal_seq")
"""Readers skip what they don't want by these."""
_DICTIONARIES = [name for name in SCHEMA.names if name not in UNLIKE_COLUMNS]
_NO_SECONDS, _NO_TEXT = pyarrow.scalar(None, _SECONDS), pyarrow.scalar(None, _TEXT)
_INSTANT_SECONDS_MAX = 253_402_300_800.0
"""The year 10,000: what foreign publishers write into their timestamps may be anything, and readers know no later."""


class Call(NamedTuple):
    """What the engine has reported at once. ``values``: from ``first_value`` on ``WIDTH`` of each of the subjects, one
    after another. Several calls share the list, which only grows; of some the rows are the same.

    ``details`` and ``new_copy_ids`` have one for each subject, or are empty.
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
    """The rows of ``calls``, in their order."""
    first_seqs, kinds, topics, groups, ats, counts, *_, details, new_copy_ids, receivers = zip(*calls, strict=True)
    kinds, counts = pyarrow.array(kinds, _TEXT), pyarrow.array(counts, pyarrow.int32())
    ends = compute.cumulative_sum(counts)
    count = ends[-1].as_py()

    def repeated(values: Array) -> Array:
        return compute.run_end_decode(pyarrow.RunEndEncodedArray.from_arrays(ends, values))

    def names(values: Array) -> Array:
        encoded = values.dictionary_encode()
        return pyarrow.DictionaryArray.from_arrays(repeated(encoded.indices), encoded.dictionary)

    def is_one_of(some: Array) -> Array:
        return repeated(compute.is_in(kinds, some))

    starts, places = compute.subtract(ends, counts), pyarrow.arange(0, count)
    parts, first_rows, row_count = _rows(calls)
    rows = compute.add(repeated(compute.subtract(pyarrow.array(first_rows, pyarrow.int64()), starts)), places)

    def of_events(column: Array) -> Array:
        return column if row_count == count else column.take(rows)

    (
        copy_id,
        queue,
        delivery_count,
        leased_at,
        client,
        lease_seconds,
        message_id,
        key,
        published_at,
        visible_at,
        size,
    ) = (of_events(_array(_column(parts, place), kind)) for place, kind in enumerate(ROW_TYPES))
    at = repeated(pyarrow.array(ats, _SECONDS))
    held_seconds = compute.max_element_wise(compute.subtract(at, leased_at), 0.0)
    is_held = compute.and_(is_one_of(_HELD_UNTIL), compute.greater(leased_at, 0.0))
    is_leased = compute.and_(is_one_of(_LEASED_FOR), compute.greater(lease_seconds, 0.0))
    published_at = _believable(published_at)
    before = compute.subtract(pyarrow.array(first_seqs, pyarrow.int64()), starts)
    return pyarrow.RecordBatch.from_arrays(
        [
            _instants(at),
            names(kinds),
            names(pyarrow.array(topics, _TEXT)),
            names(compute.if_else(compute.is_in(kinds, _OF_TOPICS), _NO_TEXT, pyarrow.array(groups, _TEXT))),
            queue,
            copy_id,
            message_id,
            key,
            compute.if_else(compute.greater(delivery_count, 0), delivery_count, pyarrow.scalar(None, _COUNT)),
            client,
            pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), count), [proxy]),
            _instants(published_at),
            _instants(compute.coalesce(_believable(visible_at), published_at)),
            compute.if_else(is_held, held_seconds, _NO_SECONDS),
            compute.if_else(is_leased, lease_seconds, _NO_SECONDS),
            size,
            repeated(pyarrow.array([",".join(sorted(some)) if some else None for some in receivers], _TEXT)),
            _texts(new_copy_ids, calls, count),
            _texts(details, calls, count),
            compute.add(repeated(before), places),
        ],
        schema=_WRITTEN,
    )


def _rows(calls: Sequence[Call]) -> tuple[list[tuple[list[Any], int, int]], list[int], int]:
    """The rows of ``calls``, each once: lists, and from where to where in them; of each call the number of its first
    row; and how many rows there are."""
    parts: list[tuple[list[Any], int, int]] = []
    first_rows: list[int] = []
    known: dict[tuple[int, int], int] = {}
    shared: list[Any] = []
    first = end = row_count = 0
    for call in calls:
        row = known.setdefault((id(call.values), call.first_value), row_count)
        first_rows.append(row)
        if row < row_count:
            continue
        row_count += call.event_count
        if call.values is not shared or call.first_value != end:
            parts.append((shared, first, end))
            shared, first = call.values, call.first_value
        end = call.first_value + WIDTH * call.event_count
    parts.append((shared, first, end))
    return parts, first_rows, row_count


def _column(parts: Sequence[tuple[list[Any], int, int]], place: int) -> list[Any]:
    column: list[Any] = []
    for values, first, end in parts:
        column += values[first + place : end : WIDTH]
    return column


def _array(column: list[Any], kind: Any) -> Array:
    """``column`` in Arrow. By far most columns have a value in each row, or in none: those are as quick as can be, for the
    event loop waits meanwhile."""
    if column[0] is None and column.count(None) == len(column):
        return pyarrow.nulls(len(column), kind)
    try:
        return _joined(column) if kind is _TEXT else _packed(column, kind)
    except (TypeError, struct.error):
        return pyarrow.array(column, kind)


def _joined(column: list[str]) -> Array:
    """Raises: TypeError, where there is None in it."""
    array = compute.split_pattern(pyarrow.array([_SEPARATOR.join(column)], _TEXT), _SEPARATOR).values
    return array if len(array) == len(column) else pyarrow.array(column, _TEXT)


def _packed(column: list[float], kind: Any) -> Array:
    """Raises: struct.error, where there is None in it, or what is no such number."""
    numbers = struct.pack(f"={len(column)}{_FORMATS[kind]}", *column)
    return pyarrow.Array.from_buffers(kind, len(column), [None, pyarrow.py_buffer(numbers)])


def readable(call: Call) -> Call:
    """``call`` without what is no text: half of a character is replaced."""
    values = call.values[call.first_value : call.first_value + WIDTH * call.event_count]
    return call._replace(
        values=[_whole_text(value) if isinstance(value, str) else value for value in values],
        first_value=0,
        details=[_whole_text(text) for text in call.details],
    )


def _whole_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _believable(seconds: Array) -> Array:
    """Null where it is no time, or none that the format could hold."""
    is_time = compute.and_(compute.greater(seconds, 0.0), compute.less(seconds, _INSTANT_SECONDS_MAX))
    return compute.if_else(is_time, seconds, _NO_SECONDS)


def _instants(seconds: Array) -> Array:
    rounded = compute.floor(compute.add(compute.multiply(seconds, 1e6), 0.5))  # three times as quick as compute.round
    return rounded.cast(pyarrow.int64()).cast(_INSTANT)


def _texts(given: Sequence[Sequence[str]], calls: Sequence[Call], count: int) -> Array:
    """A column that few calls have: an empty text is none."""
    if not any(given):
        return pyarrow.nulls(count, _TEXT)
    texts = (one or (None,) * call.event_count for one, call in zip(given, calls, strict=True))
    return pyarrow.array([text or None for text in chain.from_iterable(texts)], _TEXT)


def parquet_of(batches: Sequence[RecordBatch]) -> memoryview:
    """The bytes of a file with these rows."""
    sink = pyarrow.BufferOutputStream()
    with parquet.ParquetWriter(
        sink,
        _WRITTEN,
        store_schema=False,  # else readers would get dictionaries in place of texts
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
        write_statistics=FILTERED_COLUMNS,
        column_encoding=dict.fromkeys(RISING_COLUMNS, "DELTA_BINARY_PACKED"),
    ) as writer:
        writer.write_table(pyarrow.Table.from_batches(batches, _WRITTEN).unify_dictionaries())
        writer.add_key_value_metadata(SCHEMA.metadata)
    return memoryview(sink.getvalue())
