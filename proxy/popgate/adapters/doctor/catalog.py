"""Reads the names and owners of the queues in popgate's catalog, from Redis or from the data folder of a stopped proxy.

This module never changes the catalog.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.spec_json import SpecReader
from popgate.adapters.sqlite.folder_lock import FolderLock
from popgate.doctor.facts import Owner
from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.domain.topics import TopicSpec

LOCK_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogQueue:
    name: str
    owner: Owner


async def redis_catalog(redis: RedisConnection) -> list[CatalogQueue]:
    """Return the queues of the catalog in Redis.

    Read the catalog's hashes with plain commands, because popgate's scripts would write a new incarnation, the id of
    the stored data, to an empty Redis.

    Raises: StateUnavailable.
    """
    topics = await _texts(redis, "topics")
    groups = [tuple(key.split("/", 1)) for key, _ in await _texts(redis, "topic_groups") if "/" in key]
    return _queues(topics, [(topic, group) for topic, group in groups])


def folder_catalog(file: Path) -> list[CatalogQueue]:
    """Return the queues of the catalog in ``file``, the database of a data folder.

    If a killed proxy left a write-ahead log, SQLite itself may copy the log into the database file.

    Raises: StartupError if a proxy uses the folder; sqlite3.Error, OSError.
    """
    lock = FolderLock(file.parent)
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True, timeout=LOCK_WAIT_SECONDS)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
            topics = connection.execute("SELECT name, spec FROM topic ORDER BY name").fetchall()
            groups = connection.execute("SELECT topic, name FROM topic_group ORDER BY topic, name").fetchall()
    finally:
        lock.release()
    return _queues(topics, groups)


async def _texts(redis: RedisConnection, name: str) -> list[tuple[str, str]]:
    flat: list[bytes] = await redis.command("HGETALL", f"{redis.prefix}{name}")
    texts = [text.decode(errors="replace") for text in flat]  # no entry with a replaced character is used
    return sorted(zip(texts[::2], texts[1::2], strict=True))


def _queues(topics: Sequence[tuple[str, str]], groups: Sequence[tuple[str, str]]) -> list[CatalogQueue]:
    specs: dict[str, TopicSpec] = {spec.topic: spec for spec in SpecReader().topics(topics)}
    found: dict[str, Owner] = {queue: Owner.ADOPTED for spec in specs.values() for queue in spec.adopted}
    for topic, group in groups:
        if (spec := specs.get(topic)) is None:
            continue
        layout = spec.layout(Subscription(TopicName(topic), GroupName(group)))
        own = [layout.dead] if layout.adopted else [*layout.queues, layout.dead]
        found |= dict.fromkeys(own, Owner.POPGATE)
    return [CatalogQueue(name=name, owner=owner) for name, owner in found.items()]
