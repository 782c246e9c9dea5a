"""Implements the lease store on Redis. Most calls run one script; loading, restoring and housekeeping run several.

This module builds the arguments of the scripts and interprets their answers. A batch is packed into one argument. A
value that several entries of the batch share appears in it only once. In the same way, an answer contains each record
only once.

Costs, measured by tests/bench/redis_state.py with Redis 7.0 on two slow cores. In Redis, a million leased messages need
136 MB of memory. A million settled messages need 186 MB, and 50 MB more if each batch of 32 has an attempt id. Settled
records are deleted when they are 15 minutes old and the broker has proved that it applied the acks. So they need 170 MB
at 1,000 messages per second. The memory depends only on this rate and on the number of messages in flight. For each
message in a batch of 32, Redis needs 5 microseconds to lease and 6 to settle it, and the proxy needs 5 for each step.
For a message that is alone in its batch, Redis needs 50 microseconds and the proxy 90, for each step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.failures import RETRY_AFTER_SECONDS
from popgate.adapters.redis.grants import (
    distinct,
    each_answer,
    first_of,
    grant_answers,
    grant_call,
)
from popgate.adapters.redis.records import (
    FOREVER,
    MICROSECONDS,
    SETTLE_STATUSES,
    microseconds,
    read_records,
    restored,
    subscription_key,
)
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAnswer, remaining_seconds
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Subscription
from popgate.ports.leases import (
    AttemptLease,
    GrantRequest,
    LeaseStore,
    LoadedRecord,
    SettleEntry,
)
from popgate.runtime.in_turn import in_turn

RECORDS_PER_STEP = 1_000
"""Maximum number of records that one script loads, restores or cleans up, so that it delays others by at most 2 ms."""
ATTEMPTS_PER_STEP = 200


class RedisLeaseStore:
    """Implements the state port's lease store on ``redis``. The caller closes ``redis``."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis
        self._oldest_change: int | None = None
        """The time of the earliest change of any record (None: unknown). Until this change is old enough, ``collect``
        has nothing to delete."""

    def unavailable_reason(self) -> str | None:
        return self._redis.failure()

    async def claim(self, queue: BrokerQueue) -> int:
        epoch: int = await self._redis.run("claim", queue)
        return epoch

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        # The last part also claims the queue, and Redis settles no missing record before this claim. So all parts must
        # be written to the same data: Redis must not lose its data between them.
        starts = range(0, max(len(records), 1), RECORDS_PER_STEP)
        incarnation: bytes | None = None
        epoch: int | bool = False
        for start in starts:
            if start and self._redis.incarnation != incarnation:
                raise StateUnavailable("Redis has lost its data again", retry_after_seconds=RETRY_AFTER_SECONDS)
            part = records[start : start + RECORDS_PER_STEP]
            epoch = await self._redis.run(
                "restore",
                queue,
                [one.copy_id for one in part],
                [restored(one.record, one.remaining_seconds) for one in part],
                above if start == starts[-1] else False,
            )
            incarnation = self._redis.incarnation
        return int(epoch)

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        needed: int = await self._redis.run("allow_mode", subscription_key(subscription), generation)
        return needed

    async def load(self, queue: BrokerQueue) -> list[LoadedRecord]:
        loaded: dict[CopyId, LoadedRecord] = {}  # a part may repeat records of an earlier part
        cursor = "0"
        while True:
            places: list[int]
            time, cursor, copy_ids, places, rows = await self._redis.run("load_part", queue, cursor, RECORDS_PER_STEP)
            now, records = time / MICROSECONDS, read_records(rows)
            for copy_id, place in zip(copy_ids, places, strict=True):
                record = records[place]
                assert record is not None, "what was scanned is there"
                loaded[copy_id] = LoadedRecord(copy_id, record, remaining_seconds(record, now))
            if cursor == "0":
                return list(loaded.values())

    async def peek(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> dict[CopyId, LeaseRecord]:
        if not copy_ids:
            return {}
        places: list[int]
        _, places, rows = await self._redis.run("peek", queue, list(copy_ids))
        records = read_records(rows)
        found = ((copy_id, records[place]) for copy_id, place in zip(copy_ids, places, strict=True))
        return {copy_id: record for copy_id, record in found if record is not None}

    async def grant(self, request: GrantRequest) -> list[GrantAnswer]:
        answer = await self._redis.run(*grant_call(request))
        return grant_answers(request, answer)[0]

    async def settle(self, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
        if not entries:
            return []
        queues, queue_of = distinct([entry.queue for entry in entries])
        asks, ask_of = distinct([entry[2:] for entry in entries])
        copy_ids = [entry.copy_id for entry in entries]
        firsts = first_of(copy_ids, queue_of)
        time, statuses, places, rows = await self._redis.run(
            "settle", queues, queue_of, copy_ids, firsts, [_ask(*ask) for ask in asks], ask_of
        )
        now, records = time / MICROSECONDS, read_records(rows)

        def answer_of(status: int, place: int) -> SettleAnswer:
            record = records[place]
            remaining = 0.0 if record is None else remaining_seconds(record, now)
            return SettleAnswer(SETTLE_STATUSES[status], remaining, record, now)

        return each_answer(len(entries), statuses, places, answer_of)

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        field = f"{subscription_key(subscription)}/{attempt_id}"
        places: list[int]
        time, queues, copy_ids, places, rows = await self._redis.run("find_attempt", field)
        now, records = time / MICROSECONDS, read_records(rows)
        leases: list[AttemptLease] = []
        for queue, copy_id, place in zip(queues, copy_ids, places, strict=True):
            record = records[place]
            assert record is not None, "only leases that hold are answered"
            leases.append(AttemptLease(queue, copy_id, record, remaining_seconds(record, now)))
        return leases

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        await self._end_attempts()
        return await self._trim(queue, microseconds(settled_before), microseconds(older_than_seconds))

    async def collect(self, *, older_than_seconds: float) -> int:
        try:
            return await self._collect_all(older_than_seconds)
        finally:
            while await self._end_attempts() == ATTEMPTS_PER_STEP:
                pass

    async def _collect_all(self, older_than_seconds: float) -> int:
        queues, now = await self._redis.run("list_queues")
        before = now - microseconds(older_than_seconds)
        total = 0
        if self._oldest_change is None or self._oldest_change < before:
            oldest = now

            async def collect(queue: BrokerQueue) -> None:
                nonlocal total, oldest
                for settled in (False, True):
                    count, change = await self._collect(queue, before, settled=settled)
                    total += count
                    oldest = min(oldest, change)
                await self._trim(queue, 0, 0)  # removes the deleted records from the list of settled records

            await in_turn(partial(collect, queue) for queue in queues)
            self._oldest_change = oldest
        return total

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        # A durable record must never be deleted by mistake: it may be the only thing that prevents an acked message
        # from being delivered again.
        transient = [copy_id for copy_id in copy_ids if copy_id.startswith(TRANSIENT_PREFIX)]
        if transient:
            await self._redis.run("forget", queue, transient)

    async def drop_queue(self, queue: BrokerQueue) -> None:
        await self._redis.run("drop_queue", queue)

    # -- how -------------------------------------------------------------------------------------------------------

    async def _trim(self, queue: BrokerQueue, before: int, age: int) -> int:
        """Delete settled records in steps, and return how many were deleted. One call checks a record at most once."""
        total = 0
        left: int | None = None
        while left is None or left > 0:
            gone, seen, ends, length = await self._redis.run("trim", queue, before, age, RECORDS_PER_STEP)
            total += gone
            if ends:
                break
            left = (length if left is None else left) - seen
        return total

    async def _collect(self, queue: BrokerQueue, before: int, *, settled: bool) -> tuple[int, int]:
        """Delete a queue's records that have not changed since ``before``.

        Return how many were deleted, and the time of the earliest change of the remaining records.
        """
        total, oldest, cursor = 0, before + FOREVER, "0"
        while True:
            cursor, count, change = await self._redis.run("collect", queue, settled, cursor, RECORDS_PER_STEP, before)
            total += count
            if change is not False:
                oldest = min(oldest, change)
            if cursor == "0":
                return total, oldest

    async def _end_attempts(self) -> int:
        looked_at: int = await self._redis.run("end_attempts", ATTEMPTS_PER_STEP)
        return looked_at


def _ask(
    lease_id: str,
    action: str,
    seconds: float,
    target: str | None,
    copy_id: str | None,
    reason: str,
    age_max: float,
    under: tuple[Subscription, int] | None,
) -> tuple[Any, ...]:
    words = lease_id, action, microseconds(seconds), target or False, copy_id or False, reason, microseconds(age_max)
    return words if under is None else (*words, subscription_key(under[0]), under[1])


_conforms: type[LeaseStore] = RedisLeaseStore
