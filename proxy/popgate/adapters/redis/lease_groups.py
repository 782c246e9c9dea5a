"""Implements the store of lease groups on Redis. A script reads or changes at most ``STEP_MEMBERS_MAX`` members.

Each call runs one script, except counting and housekeeping, which run several.
"""

from functools import partial
from typing import Any

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.records import (
    MICROSECONDS,
    SETTLE_STATUSES,
    microseconds,
    read_records,
    subscription_key,
)
from popgate.domain.lease import SettleAction, SettleAnswer, remaining_seconds
from popgate.domain.lease_group import (
    GROUPS_MAX,
    STREAMS_MAX,
    GroupKey,
    GroupState,
    epoch_acked,
    no_group,
    taken_over,
    too_many_streams,
)
from popgate.domain.names import GroupName, LeaseId, StreamName, Subscription, TopicName
from popgate.domain.quotas import Quota, quota_exceeded
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
from popgate.runtime.in_turn import in_turn

POSITIONS_PER_STEP = 5_000
"""Maximum number of positions that one script counts. It exceeds ``STEP_MEMBERS_MAX``, because counting is fast."""
STREAM_TOUCHED_SECONDS = 3_600.0
"""Minimum number of seconds between two writes of a stream's record when acks change nothing. The writes show that the
stream is in use, so that ``collect`` does not delete the record."""
EPOCH_DIGITS = 20
_STATES = (GroupState.FORMING, GroupState.FROZEN, GroupState.RELEASING)
"""The group states. The index of a state is its number in Redis, so new states must be appended."""


class RedisLeaseGroups:
    """Implements the state port's store of lease groups on ``redis``, which the caller closes.

    ``RedisLeaseStore`` manages the leases of the groups' members.
    """

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis

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
        answer = await self._redis.run("begin_group", key_of(key), lease_id, builder, slices, groups_max, streams_max)
        if answer == ["full"]:
            raise quota_exceeded(Quota.LEASE_GROUPS, groups_max)
        if answer == ["crowded"]:
            raise too_many_streams(streams_max)
        row = accepted(answer, key)
        return _stored(key.stream, key.epoch, row)

    async def freeze(self, key: GroupKey, builder: str) -> StoredGroup | None:
        row = await self._ask("freeze_group", key, builder)
        return _stored(key.stream, key.epoch, row) if len(row) > 1 else None

    async def find(self, key: GroupKey) -> StoredGroup | None:
        row = await self._ask("find_group", key)
        return _stored(key.stream, key.epoch, row) if len(row) > 1 else None

    async def groups(self, subscription: Subscription, stream: StreamName | None = None) -> list[StoredGroup]:
        found: list[tuple[StreamName, str, list[Any]]] = await self._redis.run(
            "list_groups", subscription_key(subscription), False if stream is None else stream
        )
        return [_stored(name, epoch_of(code), row) for name, code, row in sorted(found)]

    async def member_count(self, key: GroupKey, first: int, end: int) -> int:
        total = 0
        place: int | bool = first
        while place is not False:
            count, place = await self._ask("count_members", key, place, end, POSITIONS_PER_STEP)
            total += count
        return total

    async def members(self, key: GroupKey, first: int, end: int) -> list[Member]:
        time, positions, queues, queue_of, copy_ids, counts, firsts, places, rows = await self._ask(
            "read_members", key, first, end, STEP_MEMBERS_MAX
        )
        now, records = time / MICROSECONDS, read_records(rows)
        found: list[Member] = []
        columns: zip[tuple[int, int, Any, int, int, int]] = zip(
            positions, queue_of, copy_ids, counts, firsts, places, strict=True
        )
        for position, number, copy_id, count, first_at, place in columns:
            record = records[place]
            remaining = 0.0 if record is None else remaining_seconds(record, now)
            first_delivered_at = first_at / MICROSECONDS
            found.append(Member(position, queues[number - 1], copy_id, count, first_delivered_at, record, remaining))
        return found

    # -- renewing -------------------------------------------------------------------------------------------------

    async def begin_renewal(self, key: GroupKey, *, seconds: float, age_seconds_max: float) -> float:
        (ends_at,) = await self._ask("begin_renewal", key, microseconds(seconds), microseconds(age_seconds_max))
        return float(ends_at / MICROSECONDS)

    async def renew(self, key: GroupKey, first: int, renewal: Renewal) -> RenewalStep:
        time, queues, queue_of, copy_ids, places, next_position, rows = await self._ask(
            "renew_group",
            key,
            first,
            microseconds(renewal.ends_at),
            renewal.regrant,
            False if renewal.max_deliveries is None else renewal.max_deliveries,
            renewal.mode_generation,
            STEP_MEMBERS_MAX,
        )
        now, records = time / MICROSECONDS, read_records(rows)
        renewed: list[RenewedMember] = []
        columns: zip[tuple[int, Any, int]] = zip(queue_of, copy_ids, places, strict=True)
        for number, copy_id, place in columns:
            record = records[place]
            remaining = 0.0 if record is None else remaining_seconds(record, now)
            renewed.append(RenewedMember(queues[number - 1], copy_id, record, remaining))
        return RenewalStep(renewed, None if next_position is False else next_position)

    # -- settling -------------------------------------------------------------------------------------------------

    async def begin_ack(
        self, subscription: Subscription, stream: StreamName, through: int, *, streams_max: int = STREAMS_MAX
    ) -> AckedSoFar:
        answer = await self._redis.run(
            "begin_ack",
            subscription_key(subscription),
            stream,
            epoch_code(through),
            microseconds(STREAM_TOUCHED_SECONDS),
            streams_max,
        )
        if answer == ["crowded"]:
            raise too_many_streams(streams_max)
        return AckedSoFar(*answer)

    async def begin_release(self, subscription: Subscription, stream: StreamName, after: int) -> None:
        await self._redis.run("begin_release", subscription_key(subscription), stream, epoch_code(after))

    async def settle_next(self, subscription: Subscription, stream: StreamName) -> SettlementStep:
        answer = await self._redis.run("settle_next", subscription_key(subscription), stream, STEP_MEMBERS_MAX)
        if len(answer) == 1:
            return SettlementStep(SettleAction.ACK, [], 0, more=False)
        time, is_ack, queues, queue_of, copy_ids, statuses, places, lost, more, rows = answer
        now, records = time / MICROSECONDS, read_records(rows)
        settled: list[SettledMember] = []
        columns: zip[tuple[int, Any, int, int]] = zip(queue_of, copy_ids, statuses, places, strict=True)
        for number, copy_id, status, place in columns:
            record = records[place]
            remaining = 0.0 if record is None else remaining_seconds(record, now)
            answered = SettleAnswer(SETTLE_STATUSES[status], remaining, record, now)
            settled.append(SettledMember(queues[number - 1], copy_id, answered))
        return SettlementStep(SettleAction.ACK if is_ack else SettleAction.RELEASE, settled, lost, more)

    # -- housekeeping ---------------------------------------------------------------------------------------------

    async def subscriptions(self) -> list[Subscription]:
        names = (home.partition("/") for home in await self._homes())
        return [Subscription(TopicName(topic), GroupName(group)) for topic, _, group in names]

    async def half_settled(self, subscription: Subscription) -> list[StreamName]:
        streams: list[StreamName] = await self._redis.run("half_settled", subscription_key(subscription))
        return streams

    async def collect(self, *, forming_seconds: float, older_than_seconds: float) -> None:
        ages = microseconds(forming_seconds), microseconds(older_than_seconds)
        await in_turn(partial(self._redis.run, "collect_groups", home, *ages) for home in await self._homes())

    async def drop(self, subscription: Subscription) -> None:
        await self._redis.run("drop_groups", subscription_key(subscription))

    # -- how ------------------------------------------------------------------------------------------------------

    async def _homes(self) -> list[str]:
        homes: list[str] = await self._redis.run("group_homes")
        return homes

    async def _ask(self, name: str, key: GroupKey, *request: object) -> list[Any]:
        """Run the script ``name`` for a group and return its answer. Raises: the errors of ``accepted``."""
        return accepted(await self._redis.run(name, key_of(key), *request), key)


def key_of(key: GroupKey) -> tuple[str, str, str]:
    """Return a group's key in the form that scripts require."""
    return subscription_key(key.subscription), key.stream, epoch_code(key.epoch)


def accepted(answer: list[Any], key: GroupKey) -> list[Any]:
    """Return a script's ``answer``, or raise the error that it reports.

    Raises: LeaseGroupAcked, LeaseGroupNotFound, Conflict.
    """
    match answer:
        case ["acked", through]:
            raise epoch_acked(key, epoch_of(through))
        case ["missing"]:
            raise no_group(key)
        case ["taken"]:
            raise taken_over(key)
        case _:
            return answer


def epoch_code(epoch: int) -> str:
    """Return an epoch as digits that scripts can compare as text. A negative number means: before all epochs."""
    return f"{max(epoch, -1) + 1:0{EPOCH_DIGITS}d}"


def epoch_of(code: str) -> int:
    return int(code) - 1


def _stored(stream: StreamName, epoch: int, row: list[Any]) -> StoredGroup:
    now, state, lease_id, slices, span, count, lost, ends_at, created_at, held_since = row
    return StoredGroup(
        stream=stream,
        epoch=epoch,
        state=_STATES[state],
        lease_id=lease_id,
        slices=slices,
        span=span,
        message_count=count,
        lost=lost,
        remaining_seconds=max(0, ends_at - now) / MICROSECONDS,
        age_seconds=max(0, now - created_at) / MICROSECONDS,
        held_seconds=max(0, now - held_since) / MICROSECONDS,
    )


_conforms: type[LeaseGroupStore] = RedisLeaseGroups
