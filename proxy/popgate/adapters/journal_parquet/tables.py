"""From what the engine has reported to Arrow, and to the bytes of a Parquet file.

Owns the schema, version 1 (docs/journal.md). Readers have the same table (``popgate_spark.journal_schema``); a column
more, fewer or of another meaning is another version.

Nearly all of it is done by Arrow, which lets go of the interpreter meanwhile: what Python does an event is on the event
loop's account. So values that a call has once are repeated there (``pc.run_end_decode``), and nothing walks over rows.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.arrow import Array, RecordBatch, compute, parquet, pyarrow
from popgate.domain.names import CopyId, GroupName, TopicName
from popgate.ports.journal import EventKind

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
"""The values of one subject, in order."""
WIDTH = len(ROW_TYPES)

HELD_UNTIL = frozenset({EventKind.ACKED, EventKind.RELEASED, EventKind.EXTENDED, EventKind.EXPIRED, EventKind.REJECTED})
"""Events that say how long a message was held."""
LEASED_FOR = frozenset({EventKind.DELIVERED, EventKind.ACKED, EventKind.RELEASED, EventKind.EXPIRED})
"""Events that say for how long its lease was given."""

RISING_COLUMNS = ("journal_seq", "at", "published_at", "visible_at")
"""Written as differences: they rise, or nearly."""
UNLIKE_COLUMNS = frozenset({*RISING_COLUMNS, "held_seconds", "new_copy_id"})
"""Hardly any value comes twice: a dictionary would only cost."""
DICTIONARY_BYTES_MAX = 8 << 20
"""The copy ids of a whole file: each comes once for every event of its message."""
FILTERED_COLUMNS = ("at", "event", "topic", "group", "journal_seq")
"""Readers skip what they don't want by these."""
_DICTIONARIES = [name for name in SCHEMA.names if name not in UNLIKE_COLUMNS]
_NONE = pyarrow.scalar(None, _SECONDS)
_INSTANT_SECONDS_MAX = 253_402_300_800.0
"""The year 10,000: what foreign publishers write into their timestamps may be anything, and readers know no later."""


class Call(NamedTuple):
    """What the engine has reported at once. ``values``: ``WIDTH`` of each of the subjects, one after another.

    ``details`` and ``new_copy_ids`` have one for each subject, or are empty.
    """

    first_seq: int
    kind: EventKind
    topic: TopicName | None
    group: GroupName | None
    at: float
    event_count: int
    values: list[Any]
    details: Sequence[str]
    new_copy_ids: Sequence[CopyId]
    groups: Sequence[GroupName]


def batch_of(calls: Sequence[Call], proxy: str) -> RecordBatch:
    """The rows of ``calls``, in their order."""
    ends = pyarrow.array(list(accumulate(call.event_count for call in calls)), pyarrow.int32())
    count = sum(call.event_count for call in calls)

    def repeated(values: Sequence[object], kind: Any) -> Array:
        runs = pyarrow.RunEndEncodedArray.from_arrays(ends, pyarrow.array(values, kind))
        return compute.run_end_decode(runs)

    values = _all_values(calls)
    columns = [pyarrow.array(values[place::WIDTH], kind) for place, kind in enumerate(ROW_TYPES)]
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
    ) = columns
    at = repeated([call.at for call in calls], _SECONDS)
    is_held = compute.and_(
        repeated([call.kind in HELD_UNTIL for call in calls], pyarrow.bool_()), compute.greater(leased_at, 0.0)
    )
    held_seconds = compute.max_element_wise(compute.subtract(at, leased_at), 0.0)
    is_leased = compute.and_(
        repeated([call.kind in LEASED_FOR for call in calls], pyarrow.bool_()), compute.greater(lease_seconds, 0.0)
    )
    published_at = _believable(published_at)
    offsets = [call.first_seq - end + call.event_count for call, end in zip(calls, ends.to_pylist(), strict=True)]
    seq = compute.add(repeated(offsets, pyarrow.int64()), pyarrow.arange(0, count))
    return pyarrow.RecordBatch.from_arrays(
        [
            _instants(at),
            repeated([call.kind for call in calls], _TEXT),
            repeated([call.topic for call in calls], _TEXT),
            repeated([call.group for call in calls], _TEXT),
            queue,
            copy_id,
            message_id,
            key,
            compute.if_else(compute.greater(delivery_count, 0), delivery_count, pyarrow.scalar(None, _COUNT)),
            client,
            pyarrow.repeat(pyarrow.scalar(proxy, _TEXT), count),
            _instants(published_at),
            _instants(compute.coalesce(_believable(visible_at), published_at)),
            compute.if_else(is_held, held_seconds, _NONE),
            compute.if_else(is_leased, lease_seconds, _NONE),
            size,
            repeated([",".join(sorted(call.groups)) or None for call in calls], _TEXT),
            _texts([call.new_copy_ids for call in calls], calls, count),
            _texts([call.details for call in calls], calls, count),
            seq,
        ],
        schema=SCHEMA,
    )


def _all_values(calls: Sequence[Call]) -> list[Any]:
    values: list[Any] = []
    for call in calls:
        values += call.values  # twice as quick as to chain them
    return values


def readable(call: Call) -> Call:
    """``call`` without what is no text: half of a character is replaced."""
    return call._replace(
        values=[_whole_text(value) if isinstance(value, str) else value for value in call.values],
        details=[_whole_text(text) for text in call.details],
    )


def _whole_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _believable(seconds: Array) -> Array:
    """Null where it is no time, or none that the format could hold."""
    is_time = compute.and_(compute.greater(seconds, 0.0), compute.less(seconds, _INSTANT_SECONDS_MAX))
    return compute.if_else(is_time, seconds, _NONE)


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
    parquet.write_table(
        pyarrow.Table.from_batches(batches, SCHEMA),
        sink,
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
        write_statistics=FILTERED_COLUMNS,
        column_encoding=dict.fromkeys(RISING_COLUMNS, "DELTA_BINARY_PACKED"),
    )
    return memoryview(sink.getvalue())
