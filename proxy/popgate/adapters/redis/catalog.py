"""Implements the catalog on Redis.

Redis stores a hash with the JSON specification of each topic, a hash with that of each group, and one version number,
which changes with either hash.
"""

from popgate.adapters.redis.change_signals import ChangeSignal
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.records import MICROSECONDS, subscription_key
from popgate.adapters.spec_json import SpecReader, group_json, topic_json
from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec
from popgate.ports.catalog import Catalog, Unreadable

_TOPICS, _GROUPS = "topics", "topic_groups"


class RedisCatalog:
    """Implements the state port's catalog on ``redis``, which the caller closes.

    ``changed`` detects changes only while ``change_signals.listen_for_changes`` runs with this object's ``signal``.
    """

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis
        self._reader = SpecReader()
        self.signal = ChangeSignal("catalog_changes")

    async def topics(self) -> list[TopicSpec]:
        return self._reader.topics(await self._redis.read_hash(_TOPICS))

    async def groups(self) -> list[GroupSpec]:
        entries = await self._redis.read_hash(_GROUPS)
        topics = await self.topics()
        keys = [(key.partition("/"), text) for key, text in entries]
        return self._reader.groups([(topic, group, text) for (topic, _, group), text in keys], topics)

    def unreadable(self) -> Unreadable:
        return self._reader.unreadable

    async def put_topic(self, spec: TopicSpec, version: int | None = None) -> int:
        self._reader.check_topic(spec.topic, await self._redis.read_field(_TOPICS, spec.topic))
        known, text = False if version is None else version, topic_json(spec)
        changed: int = await self._redis.run("put_spec", _TOPICS, spec.topic, text, known)
        if changed:
            self._redis.remember_field(_TOPICS, spec.topic, text)
        return changed

    async def delete_topic(self, topic: TopicName) -> None:
        await self._redis.run("delete_topic", topic)
        self._redis.forget_field(_TOPICS, topic)

    async def group(self, subscription: Subscription) -> GroupSpec | None:
        return self._reader.group(subscription, await self._text(subscription))

    async def change_group(self, before: GroupSpec | None, after: GroupSpec, version: int | None = None) -> int:
        present = await self._text(after.subscription)
        self._reader.check_group(after.subscription, present)
        if before != self._reader.group(after.subscription, present):
            return 0
        known = False if version is None else version
        key, text = subscription_key(after.subscription), group_json(after)
        # The script compares the stored text with ``present``, not with the text of ``before``: another release of
        # popgate may have written the same spec as a different text.
        changed: int = await self._redis.run("change_spec", _GROUPS, key, text, present or False, known)
        if changed:
            self._redis.remember_field(_GROUPS, key, text)
        return changed

    async def delete_group(self, subscription: Subscription) -> None:
        await self._redis.run("delete_spec", _GROUPS, subscription_key(subscription))
        self._redis.forget_field(_GROUPS, subscription_key(subscription))

    async def now(self) -> float:
        now: int = await self._redis.run("read_time")
        return now / MICROSECONDS

    async def version(self) -> int:
        return int(await self._redis.command("GET", f"{self._redis.prefix}catalog") or 0)

    async def changed(self) -> None:
        await self.signal.wait()

    async def _text(self, subscription: Subscription) -> str | None:
        return await self._redis.read_field(_GROUPS, subscription_key(subscription))


_conforms: type[Catalog] = RedisCatalog
