"""Stores lease groups in three tables: streams, groups and members.

Each function runs in the transaction of its caller. The domain decides about leases.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from popgate.adapters.sqlite.bulk import insert_selected, parts
from popgate.adapters.sqlite.lease_records import Key
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.lease_group import (
    GroupKey,
    GroupState,
    epoch_acked,
    no_group,
    taken_over,
    too_many_streams,
)
from popgate.domain.names import BrokerQueue, CopyId, LeaseId, StreamName, Subscription
from popgate.ports.lease_groups import StoredGroup
from popgate.ports.leases import GroupPart

_INSERT_ALIKE = (
    "REPLACE INTO lease_group_member (group_id, delivery_count, first_delivered_at, lost, position, queue_id, copy_id) "
    "SELECT ?1, ?2, ?3, 0, column1, column2, column3"
)
NOT_LEASED = 1e18
"""The end of the leases of a group that has no members yet, in seconds. It is never reached."""
_STATES = (GroupState.FORMING, GroupState.FROZEN, GroupState.RELEASING)
"""The states of groups. The file contains the index of a state in this tuple, so new states must be appended."""
_CODES = {state: code for code, state in enumerate(_STATES)}
_COLUMNS = (
    "group_id, stream, epoch, state, lease_id, slices, span, member_count, lease_group.lost, ends_at, created_at, "
    "held_since, builder"
)


class GroupRow(NamedTuple):
    """A row of ``lease_group``, and the name of the group's stream. Times are in seconds of the store's clock."""

    group_id: int
    stream: StreamName
    epoch: int
    state: GroupState
    lease_id: LeaseId
    slices: int
    span: int
    message_count: int
    lost: int
    ends_at: float
    created_at: float
    held_since: float
    builder: str

    def stored(self, now: float) -> StoredGroup:
        return StoredGroup(
            stream=self.stream,
            epoch=self.epoch,
            state=self.state,
            lease_id=self.lease_id,
            slices=self.slices,
            span=self.span,
            message_count=self.message_count,
            lost=self.lost,
            remaining_seconds=max(0.0, self.ends_at - now),
            age_seconds=max(0.0, now - self.created_at),
            held_seconds=max(0.0, now - self.held_since),
        )


class StreamRow(NamedTuple):
    stream_id: int
    acked_through: int
    acked: int
    lost: int


# -- streams ----------------------------------------------------------------------------------------------------------


def read_stream(connection: sqlite3.Connection, subscription: Subscription, stream: StreamName) -> StreamRow | None:
    row = connection.execute(
        "SELECT stream_id, acked_through, acked, lost FROM lease_stream WHERE topic = ? AND name = ? AND stream = ?",
        (*subscription, stream),
    ).fetchone()
    return None if row is None else StreamRow(*row)


def ensure_stream(
    connection: sqlite3.Connection, subscription: Subscription, stream: StreamName, now: float, streams_max: int
) -> StreamRow:
    """Return the stream. If it does not exist, create it. Raises: Conflict if there are ``streams_max`` streams."""
    row = read_stream(connection, subscription, stream)
    if row is not None:
        return row
    sql = "SELECT count(*) FROM lease_stream WHERE topic = ? AND name = ?"
    if connection.execute(sql, subscription).fetchone()[0] >= streams_max:
        raise too_many_streams(streams_max)
    cursor = connection.execute(
        "INSERT INTO lease_stream (topic, name, stream, changed_at) VALUES (?, ?, ?, ?)", (*subscription, stream, now)
    )
    assert cursor.lastrowid is not None, "a row was inserted"
    return StreamRow(cursor.lastrowid, -1, 0, 0)


# -- groups -----------------------------------------------------------------------------------------------------------


def find_group(connection: sqlite3.Connection, key: GroupKey) -> GroupRow | None:
    """Return the group of ``key``, or None if it does not exist. Raises: LeaseGroupAcked."""
    stream = read_stream(connection, key.subscription, key.stream)
    if stream is None:
        return None
    if key.epoch <= stream.acked_through:
        raise epoch_acked(key, stream.acked_through)
    return _group(
        connection.execute(
            f"SELECT {_COLUMNS} FROM lease_group JOIN lease_stream USING (stream_id) WHERE stream_id = ? AND epoch = ?",
            (stream.stream_id, key.epoch),
        ).fetchone()
    )


def found_group(connection: sqlite3.Connection, key: GroupKey) -> GroupRow:
    """Return the group of ``key`` if clients may use it. Raises: LeaseGroupAcked, LeaseGroupNotFound."""
    row = find_group(connection, key)
    if row is None or row.state is GroupState.RELEASING:
        raise no_group(key)
    return row


def formed_group(connection: sqlite3.Connection, part: GroupPart) -> GroupRow:
    """Return the group of ``part``, if the builder of ``part`` is still forming it.

    Raises: LeaseGroupAcked, Conflict.
    """
    row = find_group(connection, part.key)
    if row is None or row.state is not GroupState.FORMING or row.builder != part.builder:
        raise taken_over(part.key)
    return row


def read_groups(
    connection: sqlite3.Connection, subscription: Subscription, stream: StreamName | None
) -> list[GroupRow]:
    """Return the groups that are not acked yet, ordered by stream and epoch.

    If ``stream`` is None, the groups of all streams are returned. A group is acked if its epoch is at most
    ``acked_through`` of its stream.
    """
    narrowed = "" if stream is None else " AND stream = ?"
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM lease_stream JOIN lease_group USING (stream_id) "
        f"WHERE topic = ? AND name = ?{narrowed} AND epoch > acked_through ORDER BY stream, epoch",
        subscription if stream is None else (*subscription, stream),
    )
    return [group for row in rows if (group := _group(row)) is not None]


def group_count(connection: sqlite3.Connection, subscription: Subscription) -> int:
    """Return the number of stored groups of the subscription.

    This includes groups that were acked or released, but whose messages are not settled yet.
    """
    (count,) = connection.execute(
        "SELECT count(*) FROM lease_stream JOIN lease_group USING (stream_id) WHERE topic = ? AND name = ?",
        subscription,
    ).fetchone()
    return int(count)


def insert_group(
    connection: sqlite3.Connection,
    stream: StreamRow,
    epoch: int,
    *,
    lease_id: LeaseId,
    builder: str,
    slices: int,
    now: float,
) -> None:
    connection.execute(
        "INSERT INTO lease_group (stream_id, epoch, state, lease_id, builder, slices, ends_at, created_at, held_since) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (stream.stream_id, epoch, _CODES[GroupState.FORMING], lease_id, builder, slices, NOT_LEASED, now, now),
    )


def set_state(connection: sqlite3.Connection, group_id: int, state: GroupState) -> None:
    connection.execute("UPDATE lease_group SET state = ? WHERE group_id = ?", (_CODES[state], group_id))


def release_later(connection: sqlite3.Connection, stream_id: int, after: int) -> None:
    connection.execute(
        "UPDATE lease_group SET state = ? WHERE stream_id = ? AND epoch > ?",
        (_CODES[GroupState.RELEASING], stream_id, after),
    )


def next_to_settle(connection: sqlite3.Connection, stream: StreamRow) -> tuple[GroupRow | None, bool]:
    """Return the group of the stream that must be settled next, and whether more groups must be settled.

    The group is None if no group of the stream must be settled.
    """
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM lease_group JOIN lease_stream USING (stream_id) "
        "WHERE stream_id = ? AND (epoch <= ? OR state = ?) ORDER BY epoch LIMIT 2",
        (stream.stream_id, stream.acked_through, _CODES[GroupState.RELEASING]),
    ).fetchall()
    return (_group(rows[0]) if rows else None), len(rows) > 1


def subscriptions_with_groups(connection: sqlite3.Connection) -> list[Subscription]:
    rows = connection.execute("SELECT DISTINCT topic, name FROM lease_group JOIN lease_stream USING (stream_id)")
    return [Subscription(topic, name) for topic, name in rows]


def streams_to_settle(connection: sqlite3.Connection, subscription: Subscription) -> list[StreamName]:
    rows = connection.execute(
        "SELECT DISTINCT stream FROM lease_group JOIN lease_stream USING (stream_id) "
        "WHERE topic = ? AND name = ? AND (epoch <= acked_through OR state = ?)",
        (*subscription, _CODES[GroupState.RELEASING]),
    )
    return [StreamName(stream) for (stream,) in rows]


def abandon_groups(
    connection: sqlite3.Connection, *, formed_before: float, ended_before: float, forgotten_before: float
) -> None:
    """Mark abandoned groups for release, and delete unused streams.

    A group is abandoned if its leases ended before ``ended_before``. A group that is still being formed is already
    abandoned if its leases ended before ``formed_before``, or if it has never had a member and was created before
    ``formed_before``. A stream is deleted if it has no groups and has not changed since ``forgotten_before``.
    """
    connection.execute(
        "UPDATE lease_group SET state = ?1 WHERE ends_at < ?4 "
        "OR (state = ?2 AND (ends_at < ?3 OR (span = 0 AND created_at < ?3)))",
        (_CODES[GroupState.RELEASING], _CODES[GroupState.FORMING], formed_before, ended_before),
    )
    connection.execute(
        "DELETE FROM lease_stream WHERE changed_at < ? "
        "AND NOT EXISTS (SELECT 1 FROM lease_group WHERE lease_group.stream_id = lease_stream.stream_id)",
        (forgotten_before,),
    )


# -- members ----------------------------------------------------------------------------------------------------------


def add_members(
    connection: sqlite3.Connection,
    group: GroupRow,
    granted: Mapping[Key, LeaseRecord],
    former: Mapping[Key, LeaseRecord],
    ends_at: float,
) -> None:
    """Add the messages ``granted`` to the members of ``group``, which must be FORMING.

    ``former`` contains the lease records that existed before the grant. A new member is added at the next position. A
    member whose lease ended and was granted again keeps its position. There is one exception: if the group released the
    member because earlier messages of the same ordering key had to be granted first, the member moves to a new position
    behind these messages.
    """
    met = [key for key in granted if key in former]  # the other messages are new members
    places = find_places(connection, group.group_id, met)
    returned = [
        key for key in places if former[key].lease_id == group.lease_id and former[key].state is RecordState.RELEASED
    ]
    lose_members(connection, group, [places.pop(key) for key in returned])
    span = group.span
    rows: dict[tuple[int, float], list[tuple[object, ...]]] = {}
    for key, record in granted.items():
        place = places.get(key)
        if place is None:
            place, span = span, span + 1
        rows.setdefault((record.delivery_count, record.first_delivered_at), []).append((place, *key))
    for alike, placed in rows.items():
        insert_selected(connection, _INSERT_ALIKE, (group.group_id, *alike), placed)
    connection.execute(
        "UPDATE lease_group SET span = ?2, member_count = member_count + ?2 - span, ends_at = min(ends_at, ?3) "
        "WHERE group_id = ?1",
        (group.group_id, span, ends_at),
    )


def find_places(connection: sqlite3.Connection, group_id: int, keys: Sequence[Key]) -> dict[Key, int]:
    """Return the positions of those ``keys`` that are members of the group. Other keys are left out."""
    places: dict[Key, int] = {}
    for part in parts(keys):
        sql = (
            f"WITH wanted (queue_id, copy_id) AS (VALUES {','.join(['(?, ?)'] * len(part))}) "
            "SELECT queue_id, copy_id, position FROM wanted CROSS JOIN lease_group_member USING (queue_id, copy_id) "
            "WHERE group_id = ?"
        )
        for queue_id, copy_id, position in connection.execute(sql, (*chain.from_iterable(part), group_id)):
            places[queue_id, copy_id] = position
    return places


class MemberRow(NamedTuple):
    position: int
    queue: BrokerQueue
    copy_id: CopyId
    delivery_count: int
    first_delivered_at: float
    queue_id: int

    @property
    def key(self) -> Key:
        return self.queue_id, self.copy_id


def read_members(
    connection: sqlite3.Connection, group_id: int, first: int, end: int, limit: int
) -> Sequence[MemberRow]:
    """Return at most ``limit`` members at positions [first, end) that are not lost, ordered by position."""
    rows = connection.execute(
        "SELECT position, name, copy_id, delivery_count, first_delivered_at, queue_id "
        "FROM lease_group_member JOIN lease_queue USING (queue_id) "
        "WHERE group_id = ? AND position >= ? AND position < ? AND lost = 0 ORDER BY position LIMIT ?",
        (group_id, first, end, limit),
    )
    return [MemberRow(*row) for row in rows]


def count_members(connection: sqlite3.Connection, group_id: int, first: int, end: int) -> int:
    count: int
    (count,) = connection.execute(
        "SELECT count(*) FROM lease_group_member WHERE group_id = ? AND position >= ? AND position < ? AND lost = 0",
        (group_id, first, end),
    ).fetchone()
    return count


def lose_members(connection: sqlite3.Connection, group: GroupRow, positions: Sequence[int]) -> None:
    """Mark the members at ``positions`` as lost, because the group no longer has their leases.

    If the group is FORMING, delete these members instead, because no client has seen them.
    """
    if not positions:
        return
    if group.state is GroupState.FORMING:
        sql, counted = "DELETE FROM lease_group_member WHERE group_id = ? AND position = ?", 0
    else:
        sql, counted = "UPDATE lease_group_member SET lost = 1 WHERE group_id = ? AND position = ?", len(positions)
    connection.executemany(sql, [(group.group_id, position) for position in positions])
    connection.execute(
        "UPDATE lease_group SET member_count = member_count - ?, lost = lost + ? WHERE group_id = ?",
        (len(positions), counted, group.group_id),
    )


def delete_members_until(connection: sqlite3.Connection, group_id: int, end: int) -> None:
    connection.execute("DELETE FROM lease_group_member WHERE group_id = ? AND position < ?", (group_id, end))


def _group(row: tuple[Any, ...] | None) -> GroupRow | None:
    if row is None:
        return None
    fields = dict(zip(GroupRow._fields, row, strict=True))
    return GroupRow(**{**fields, "state": _STATES[row[3]]})
