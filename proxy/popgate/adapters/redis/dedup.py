"""The dedup store on Redis: every call is one script; cleaning up is a series of short ones."""

from collections.abc import Sequence

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.records import microseconds
from popgate.domain.names import CopyId, TopicName
from popgate.ports.dedup import DedupEntry, DedupStore, Reservation

IDS_PER_STEP = 1_000
"""Maximum number of ids in one step of housekeeping, so that other calls wait a millisecond or two at most."""


class RedisDedupStore:
    """The state port's dedup half on ``redis``, which the caller closes."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis

    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Reservation]:
        found: list[tuple[int, CopyId, str, int, bool]] = await self._redis.run(
            "reserve", topic, microseconds(window_seconds), entries
        )
        earlier: dict[str, Reservation] = {}
        for number, copy_id, message_id, index, is_confirmed in found:
            dedup_id = entries[number - 1].dedup_id
            earlier[dedup_id] = Reservation(DedupEntry(dedup_id, copy_id, message_id, index), is_confirmed)
        return earlier

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        await self._redis.run("confirm", topic, entries)

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        await self._redis.run("cancel", topic, entries)

    async def drop_topic(self, topic: TopicName) -> None:
        await self._redis.run("drop_topic", topic)

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        total, more = 0, True
        while more:
            gone, more = await self._redis.run(
                "collect_ids", microseconds(window_seconds), microseconds(noted_seconds), IDS_PER_STEP
            )
            total += gone
        return total


_conforms: type[DedupStore] = RedisDedupStore
