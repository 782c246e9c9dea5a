"""Implements the lease-group store on SQLite.

Long operations run in steps. Each step is one transaction that changes at most ``STEP_MEMBERS_MAX`` members. This
module chooses the rows that a step reads and writes. ``lease_group_rows`` and ``lease_records`` own the rows. The
domain decides about leases.
"""

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.lease_group_rows import (
    GroupRow,
    MemberRow,
    abandon_groups,
    count_members,
    delete_members_until,
    ensure_stream,
    find_group,
    formed_group,
    found_group,
    group_count,
    insert_group,
    lose_members,
    next_to_settle,
    read_groups,
    read_members,
    read_stream,
    release_later,
    set_state,
    streams_to_settle,
    subscriptions_with_groups,
)
from popgate.adapters.sqlite.lease_records import Key, LatestRecords
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import (
    LeaseRecord,
    SettleAction,
    SettleAnswer,
    SettleStatus,
    decide_settle,
    remaining_seconds,
)
from popgate.domain.lease_group import GROUPS_MAX, STREAMS_MAX, GroupKey, GroupState, decide_renewal, lease_end
from popgate.domain.names import LeaseId, StreamName, Subscription
from popgate.domain.quotas import Quota, check_quota
from popgate.ports.lease_groups import (
    STEP_MEMBERS_MAX,
    AckedSoFar,
    LeaseGroupStore,
    Member,
    Renewal,
    RenewalStep,
    RenewedMember,
    SettledMember,
    SettlementStep,
    StoredGroup,
)
from popgate.ports.leases import GroupPart

T = TypeVar("T")

_STREAM_TOUCHED_SECONDS = 3_600.0
"""Minimum seconds between two updates of a stream's ``changed_at`` by acks that change nothing else. These updates
prevent the deletion of the stream."""
_NOTHING = SettlementStep(SettleAction.ACK, [], 0, more=False)


class SqliteLeaseGroups:
    """Implements the port ``LeaseGroupStore`` on ``database``.

    ``records`` is the cache of lease records, which this store must share with the lease store.
    """

    def __init__(self, database: Database, records: LatestRecords) -> None:
        self._database = database
        self._records = records

    # -- forming and finding --------------------------------------------------------------------------------------

    async def begin(
        self,
        key: GroupKey,
        *,
        lease_id: LeaseId,
        builder: str,
        slices: int,
        groups_max: int = GROUPS_MAX,
        streams_max: int = STREAMS_MAX,
    ) -> StoredGroup:
        def job(connection: sqlite3.Connection) -> StoredGroup:
            now = self._database.now()
            row = find_group(connection, key)
            if row is None:
                check_quota(Quota.LEASE_GROUPS, groups_max, group_count(connection, key.subscription))
                stream = ensure_stream(connection, key.subscription, key.stream, now, streams_max)
                insert_group(connection, stream, key.epoch, lease_id=lease_id, builder=builder, slices=slices, now=now)
            elif row.state is GroupState.FORMING:
                connection.execute(
                    "UPDATE lease_group SET builder = ?, slices = ? WHERE group_id = ?", (builder, slices, row.group_id)
                )
            present = find_group(connection, key)
            assert present is not None, "it was there, or was inserted"
            return present.stored(now)

        return await self._write(job)

    async def freeze(self, key: GroupKey, builder: str) -> StoredGroup | None:
        def job(connection: sqlite3.Connection) -> StoredGroup | None:
            row = formed_group(connection, GroupPart(key, builder))
            if not row.message_count:
                _delete_group(connection, row)
                return None
            set_state(connection, row.group_id, GroupState.FROZEN)
            return found_group(connection, key).stored(self._database.now())

        return await self._write(job)

    async def find(self, key: GroupKey) -> StoredGroup | None:
        def job(connection: sqlite3.Connection) -> StoredGroup | None:
            row = find_group(connection, key)
            return None if row is None else row.stored(self._database.now())

        return await self._read(job)

    async def groups(self, subscription: Subscription, stream: StreamName | None = None) -> list[StoredGroup]:
        def job(connection: sqlite3.Connection) -> list[StoredGroup]:
            now = self._database.now()
            return [row.stored(now) for row in read_groups(connection, subscription, stream)]

        return await self._read(job)

    async def member_count(self, key: GroupKey, first: int, end: int) -> int:
        return await self._read(lambda c: count_members(c, found_group(c, key).group_id, first, end))

    async def members(self, key: GroupKey, first: int, end: int) -> list[Member]:
        def job(connection: sqlite3.Connection) -> list[Member]:
            read = read_members(connection, found_group(connection, key).group_id, first, end, STEP_MEMBERS_MAX)
            records = self._records.read(connection, [member.key for member in read])
            now = self._database.now()
            return [_with_record(member, records.get(member.key), now) for member in read]

        return await self._read(job)

    # -- renewing -------------------------------------------------------------------------------------------------

    async def begin_renewal(self, key: GroupKey, *, seconds: float, age_seconds_max: float) -> float:
        def job(connection: sqlite3.Connection) -> float:
            now = self._database.now()
            row = found_group(connection, key)
            if row.ends_at > now:
                return lease_end(now, seconds, row.held_since, age_seconds_max)
            connection.execute("UPDATE lease_group SET held_since = ? WHERE group_id = ?", (now, row.group_id))
            return lease_end(now, seconds, now, age_seconds_max)

        return await self._write(job)

    async def renew(self, key: GroupKey, first: int, renewal: Renewal) -> RenewalStep:
        def job(connection: sqlite3.Connection) -> RenewalStep:
            row = found_group(connection, key)
            is_overtaken = self._records.generation(connection, key.subscription) > renewal.mode_generation
            return self._renew(connection, row, first, renewal, is_overtaken=is_overtaken)

        return await self._write(job)

    def _renew(
        self, connection: sqlite3.Connection, group: GroupRow, first: int, renewal: Renewal, *, is_overtaken: bool
    ) -> RenewalStep:
        now = self._database.now()
        read = read_members(connection, group.group_id, first, group.span, STEP_MEMBERS_MAX)
        records = self._records.read(connection, [member.key for member in read])
        changed: dict[Key, LeaseRecord] = {}
        lost: list[int] = []
        renewed: list[RenewedMember] = []
        for member in read:
            record = decide_renewal(
                records.get(member.key),
                now=now,
                lease_id=group.lease_id,
                ends_at=renewal.ends_at,
                is_overtaken=is_overtaken,
                regrant=renewal.regrant,
                max_deliveries=renewal.max_deliveries,
            )
            if record is None:
                lost.append(member.position)
                renewed.append(RenewedMember(member.queue, member.copy_id, None, 0.0))
            else:
                changed[member.key] = record
                renewed.append(RenewedMember(member.queue, member.copy_id, record, remaining_seconds(record, now)))
        self._records.write(connection, changed)
        lose_members(connection, group, lost)
        if len(read) == STEP_MEMBERS_MAX:
            return RenewalStep(renewed, read[-1].position + 1)
        sql = "UPDATE lease_group SET ends_at = ? WHERE group_id = ?"
        connection.execute(sql, (renewal.ends_at, group.group_id))
        return RenewalStep(renewed, None)

    # -- settling -------------------------------------------------------------------------------------------------

    async def begin_ack(
        self, subscription: Subscription, stream: StreamName, through: int, *, streams_max: int = STREAMS_MAX
    ) -> AckedSoFar:
        def job(connection: sqlite3.Connection) -> AckedSoFar:
            now = self._database.now()
            row = ensure_stream(connection, subscription, stream, now, streams_max)
            if through > row.acked_through:
                connection.execute(
                    "UPDATE lease_stream SET acked_through = ?, acked = 0, lost = 0, changed_at = ? "
                    "WHERE stream_id = ?",
                    (through, now, row.stream_id),
                )
                return AckedSoFar(0, 0)
            connection.execute(
                "UPDATE lease_stream SET changed_at = ?1 WHERE stream_id = ?2 AND changed_at < ?3",
                (now, row.stream_id, now - _STREAM_TOUCHED_SECONDS),
            )
            return AckedSoFar(row.acked, row.lost) if through == row.acked_through else AckedSoFar(0, 0)

        return await self._write(job)

    async def begin_release(self, subscription: Subscription, stream: StreamName, after: int) -> None:
        def job(connection: sqlite3.Connection) -> None:
            row = read_stream(connection, subscription, stream)
            if row is not None:  # epochs up to the watermark are acked and can't be released
                release_later(connection, row.stream_id, max(after, row.acked_through))

        await self._write(job)

    async def settle_next(self, subscription: Subscription, stream: StreamName) -> SettlementStep:
        return await self._write(lambda connection: self._settle_next(connection, subscription, stream))

    def _settle_next(
        self, connection: sqlite3.Connection, subscription: Subscription, stream: StreamName
    ) -> SettlementStep:
        row = read_stream(connection, subscription, stream)
        group, others = (None, False) if row is None else next_to_settle(connection, row)
        if row is None or group is None:
            return _NOTHING
        # If a group was never frozen, no client has read its messages. So these messages are released, even if an ack
        # covers the group.
        is_ack = group.state is GroupState.FROZEN
        action = SettleAction.ACK if is_ack else SettleAction.RELEASE
        now = self._database.now()
        read = read_members(connection, group.group_id, 0, group.span, STEP_MEMBERS_MAX)
        records = self._records.read(connection, [member.key for member in read])
        settled: list[SettledMember] = []
        changed: dict[Key, LeaseRecord] = {}
        answers: dict[int, SettleAnswer] = {}
        lost = 0
        for member in read:
            key = member.key
            record = records.get(key)
            answer = answers.get(id(record))  # messages that were leased together share one record, and so one answer
            if answer is None:
                answer = answers[id(record)] = decide_settle(record, action, now=now, lease_id=group.lease_id)
            lost += answer.status is SettleStatus.LOST
            if answer.status is SettleStatus.DONE and answer.record is not None:
                changed[key] = answer.record
            settled.append(SettledMember(member.queue, member.copy_id, answer))
        self._records.write(connection, changed)
        is_last = len(read) < STEP_MEMBERS_MAX
        if is_last:
            lost += group.lost
            _delete_group(connection, group)
        else:
            delete_members_until(connection, group.group_id, read[-1].position + 1)
        if is_ack:
            connection.execute(
                "UPDATE lease_stream SET acked = acked + ?, lost = lost + ? WHERE stream_id = ?",
                (len(changed), lost, row.stream_id),
            )
        return SettlementStep(action, settled, lost, more=others or not is_last)

    # -- housekeeping ---------------------------------------------------------------------------------------------

    async def subscriptions(self) -> list[Subscription]:
        return await self._read(subscriptions_with_groups)

    async def half_settled(self, subscription: Subscription) -> list[StreamName]:
        return await self._read(lambda connection: streams_to_settle(connection, subscription))

    async def collect(self, *, forming_seconds: float, older_than_seconds: float) -> None:
        def job(connection: sqlite3.Connection) -> None:
            now = self._database.now()
            before = now - older_than_seconds
            abandon_groups(
                connection, formed_before=now - forming_seconds, ended_before=before, forgotten_before=before
            )

        await self._write(job)

    async def drop(self, subscription: Subscription) -> None:
        while await self._write(lambda connection: _drop_part(connection, subscription)):
            pass

    # -- how ------------------------------------------------------------------------------------------------------

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.write(job, StateUnavailable)

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.read(job, StateUnavailable)


def _with_record(row: MemberRow, record: LeaseRecord | None, now: float) -> Member:
    return Member(*row[:5], record, 0.0 if record is None else remaining_seconds(record, now))


def _delete_group(connection: sqlite3.Connection, group: GroupRow) -> None:
    """Delete a group and its remaining members."""
    delete_members_until(connection, group.group_id, group.span)
    connection.execute("DELETE FROM lease_group WHERE group_id = ?", (group.group_id,))


def _drop_part(connection: sqlite3.Connection, subscription: Subscription) -> bool:
    """Delete one group of the subscription, or the subscription's streams if no group is left.

    Return whether the function must be called again.
    """
    row = connection.execute(
        "SELECT group_id FROM lease_group JOIN lease_stream USING (stream_id) WHERE topic = ? AND name = ? LIMIT 1",
        subscription,
    ).fetchone()
    if row is None:
        connection.execute("DELETE FROM lease_stream WHERE topic = ? AND name = ?", subscription)
        return False
    connection.execute("DELETE FROM lease_group_member WHERE group_id = ?", row)
    connection.execute("DELETE FROM lease_group WHERE group_id = ?", row)
    return True


_conforms: type[LeaseGroupStore] = SqliteLeaseGroups
