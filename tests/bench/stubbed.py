"""`popgate serve` with the writes of leases and settlements stubbed out, to measure the cost of everything else.

python stubbed.py serve ... no guarantee holds; for the benchmark alone
"""

import sys
import time
from collections.abc import Sequence

from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.cli import main
from popgate.domain.lease import GrantAnswer, GrantStatus, LeaseRecord, RecordState, SettleAnswer, SettleStatus
from popgate.ports.leases import GrantRequest, SettleEntry


async def _grant(_: RedisLeaseStore, request: GrantRequest) -> list[GrantAnswer]:
    now, seconds = time.time(), request.invisibility_seconds
    records = {
        epoch: LeaseRecord(
            state=RecordState.LEASED,
            lease_id=request.lease_id,
            visible_at=now + seconds,
            delivery_count=1,
            first_delivered_at=now,
            changed_at=now,
            epoch=epoch,
            leased_at=now,
        )
        for epoch in {entry.epoch for entry in request.entries}
    }
    answers = {epoch: GrantAnswer(GrantStatus.GRANTED, seconds, record) for epoch, record in records.items()}
    return [answers[entry.epoch] for entry in request.entries]


async def _settle(_: RedisLeaseStore, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
    now = time.time()
    record = LeaseRecord(
        state=RecordState.ACKED,
        lease_id=entries[0].lease_id,
        visible_at=now,
        delivery_count=1,
        first_delivered_at=now,
        changed_at=now,
        epoch=1,
        leased_at=now,
    )
    return [SettleAnswer(SettleStatus.DONE, 0.0, record, now)] * len(entries)


if __name__ == "__main__":
    setattr(RedisLeaseStore, "grant", _grant)  # noqa: B010  # type checkers are right that it is no method
    setattr(RedisLeaseStore, "settle", _settle)  # noqa: B010
    sys.exit(main())
