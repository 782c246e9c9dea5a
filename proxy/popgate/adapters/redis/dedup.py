"""Implements the dedup store on Redis. Each call runs one script, except ``collect``, which runs several short ones."""

from collections.abc import Sequence

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.records import microseconds
from popgate.domain.names import CopyId, TopicName
from popgate.ports.dedup import DedupEntry, DedupStore, Reservation

IDS_PER_STEP = 1_000
"""Maximum number of ids for one housekeeping script, so that it delays other calls by at most 2 ms."""


class RedisDedupStore:
    """Implements the state port's dedup store on ``redis``. The caller closes ``redis``."""

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
