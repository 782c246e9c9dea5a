"""Reads the names and owners of the queues in popgate's catalog, from Redis or from the data folder of a stopped proxy.

This module never changes the catalog.
"""

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.spec_json import SpecReader
from popgate.adapters.sqlite.folder_lock import unused
from popgate.adapters.sqlite.log_check import damage_in
from popgate.adapters.sqlite.opening import LOG_CHECK_BYTES_MAX
from popgate.doctor.facts import Owner
from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.domain.topics import TopicSpec


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

    SQLite opens a copy only. In the folder, it would delete a log whose damage a proxy refuses, and would carry out,
    with the rights of root, what another user has written beside the file.

    Raises: StartupError if a proxy uses the folder; sqlite3.Error, OSError.
    """
    with unused(file.parent), TemporaryDirectory() as private:
        copy = Path(private) / "copy"
        log = file.with_name(f"{file.name}-wal")
        if (damage := damage_in(log, bytes_max=LOG_CHECK_BYTES_MAX)) is not None:
            raise OSError(f"{log} is damaged: {damage}")
        shutil.copyfile(file, copy)
        if log.exists():
            shutil.copyfile(log, copy.with_name(f"{copy.name}-wal"))
        with closing(sqlite3.connect(copy)) as connection:
            topics = connection.execute("SELECT name, spec FROM topic ORDER BY name").fetchall()
            groups = connection.execute("SELECT topic, name FROM topic_group ORDER BY topic, name").fetchall()
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
