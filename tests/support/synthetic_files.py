"""The files of a generated journal (`synthetic_journal`): one a proxy and hour, as proxies write them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as untyped_pa  # type: ignore[import-untyped]  # noqa: ICN001  # it has no stubs
import pyarrow.parquet as untyped_parquet  # type: ignore[import-untyped]  # it has no stubs

from popgate_spark.journal_schema import COLUMNS, VERSION, VERSION_KEY
from support.synthetic_journal import (
    GROUPS,
    HOUR,
    KINDS,
    PROXIES,
    SECOND,
    SKEWS,
    TOPIC,
    Ints,
    Messages,
    Plan,
    Planted,
    Rows,
    Story,
    Subject,
    told,
)

pa: Any = untyped_pa
pq: Any = untyped_parquet
ROWS_A_FILE = 250_000


def write_journal(folder: Path, plan: Plan, topic: str = TOPIC) -> Planted:
    """Write the journal's files below `folder`. Proxies of a topic other than the default have different names."""
    chance, messages, story, planted = told(plan, topic)
    return _write(folder, plan, chance, messages, story, planted)


def _write(
    folder: Path, plan: Plan, chance: np.random.Generator, messages: Messages, story: Story, chosen: dict[str, Ints]
) -> Planted:
    everyone = np.arange(plan.messages)
    nobody, unknown = np.full(plan.messages, -1), np.full(plan.messages, np.nan)
    published = Rows(
        *(0, everyone, nobody, messages.confirmed, np.zeros_like(nobody), nobody, messages.proxy, unknown, unknown),
        nobody,
    )
    doubtful = chance.integers(0, plan.messages, plan.messages // 500)
    repeats = published.only(KINDS.index("duplicate"), doubtful)
    parts = [published, repeats, *story.rows]
    kind = np.concatenate([np.full(len(part.at), part.kind, np.int8) for part in parts])
    columns = [np.concatenate([part[index] for part in parts]) for index in range(1, len(Rows._fields))]
    at = columns[2]
    order = np.argsort(at, kind="stable")
    order = order[at[order] < messages.end]  # the rest is still to come
    hidden = None
    if plan.gap_rows:
        hidden = int(chance.integers(len(PROXIES)))
    events = _files(folder, plan, messages, kind[order], [column[order] for column in columns], hidden)
    ids = messages.copy_ids().astype(str)

    def named(name: str) -> frozenset[Subject]:
        which: Sequence[int] = chosen.get(name, np.empty(0, np.int64)).tolist()
        return frozenset((GROUPS[int(story.group[one])], str(ids[int(story.message[one])])) for one in which)

    return Planted(
        events=events,
        lost=named("lost"),
        doubled=named("doubled"),
        acked_twice=named("acked_twice"),
        came_again=named("came_again"),
        reordered=named("reordered"),
        stuck=named("stuck"),
        hung_client=f"client-{plan.clients - 1:02d}" if plan.hung_client else None,
        hot_queue=messages.hot_queue,
        gap_proxy=None if hidden is None else PROXIES[hidden],
    )


def _files(
    folder: Path, plan: Plan, messages: Messages, kind: npt.NDArray[np.int8], columns: list[Any], hidden: int | None
) -> int:
    """Yield one file a proxy, hour and `ROWS_A_FILE`, with its number of events."""
    proxies, events = columns[5], 0
    for number, proxy in enumerate(PROXIES):
        name = proxy if messages.topic == TOPIC else f"{messages.topic}-{proxy}"
        mine = np.flatnonzero(proxies == number)
        seqs = np.arange(1, len(mine) + 1)
        if number == hidden:
            low = len(mine) // 3
            kept = np.r_[0:low, low + plan.gap_rows : len(mine)]
            mine, seqs = mine[kept], seqs[kept]
        at = columns[2][mine] + messages.start + SKEWS[number]
        hours = at // HOUR
        borders = np.flatnonzero(np.diff(hours)) + 1
        starts = np.unique(np.concatenate([[0], borders, np.arange(0, len(mine), ROWS_A_FILE)]))
        for low, high in zip(starts, [*starts[1:], len(mine)], strict=True):
            if low == high:
                continue
            rows = mine[low:high]
            when = datetime.fromtimestamp(int(at[low]) / SECOND, UTC)
            place = folder / f"date={when:%Y-%m-%d}" / f"hour={when:%H}"
            place.mkdir(parents=True, exist_ok=True)
            table = _table(
                messages, kind[rows], [column[rows] for column in columns], at[low:high], seqs[low:high], name
            )
            target = place / f"journal-{name}-{seqs[low]:012d}.parquet"
            partial = target.with_name(f".{target.name}")
            pq.write_table(table, partial, compression="zstd")
            partial.rename(target)
            events += len(rows)
    return events


def _table(messages: Messages, kind: npt.NDArray[np.int8], columns: list[Any], at: Ints, seqs: Ints, proxy: str) -> Any:
    message, group, _, count, client, _, held, lease, new = columns
    total = len(messages.published)
    origin = message % total
    is_publish = (kind == 0) | (kind == KINDS.index("duplicate"))
    copy_ids = messages.copy_ids()
    published = messages.published[origin] + messages.start
    visible = messages.visible[origin] + messages.start
    key = messages.key[origin]

    def picked(names: Sequence[str], numbers: Any, absent: Any = None) -> Any:
        indices = pa.array(np.where(numbers < 0, 0, numbers).astype(np.int32), mask=absent)
        return pa.DictionaryArray.from_arrays(indices, pa.array(names)).cast(pa.string())

    size = len(message)
    arrays: dict[str, Any] = {
        "at": at,
        "event": picked(KINDS, kind),
        "topic": picked([messages.topic], np.zeros(size, np.int64)),
        "group": picked(GROUPS, group, group < 0),
        "queue": messages.queue[origin].astype(np.int32),
        "copy_id": pa.array(copy_ids[message]).cast(pa.string()),
        "message_id": pa.array(np.char.add(b"m-", copy_ids[origin])).cast(pa.string()),
        "ordering_key": picked([f"customer-{one}" for one in range(int(key.max(initial=0)) + 1)], key, key < 0),
        "delivery_count": pa.array(count.astype(np.int32), mask=count == 0),
        "client": picked([f"client-{one:02d}" for one in range(int(client.max(initial=0)) + 1)], client, client < 0),
        "proxy": picked([proxy], np.zeros(size, np.int64)),
        "published_at": published,
        "visible_at": visible,
        "held_seconds": pa.array(held, mask=np.isnan(held)),
        "invisibility_seconds": pa.array(lease, mask=np.isnan(lease)),
        "size_bytes": messages.size[origin],
        "groups": picked([",".join(GROUPS)], np.zeros(size, np.int64), ~is_publish),
        "new_copy_id": pa.array(copy_ids[np.where(new < 0, 0, new)], mask=new < 0).cast(pa.string()),
        "detail": picked(
            ["acked"], np.where(kind == KINDS.index("found_settled"), 0, -1), kind != KINDS.index("found_settled")
        ),
        "journal_seq": seqs,
    }
    types = {"timestamp[us, tz=UTC]": pa.timestamp("us", "UTC"), "double": pa.float64()}
    fields = [pa.field(one.name, types.get(one.type) or pa.type_for_alias(one.type), one.nullable) for one in COLUMNS]
    schema = pa.schema(fields, metadata={VERSION_KEY: str(VERSION)})
    return pa.table([pa.array(arrays[one.name]).cast(schema.field(one.name).type) for one in COLUMNS], schema=schema)
