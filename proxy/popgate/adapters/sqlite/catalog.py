"""The catalog on SQLite: one JSON row a topic, one a group.

A field that a newer popgate adds gets its default here, so that a file survives an upgrade without a new schema.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from popgate.adapters.sqlite.database import Database
from popgate.domain.errors import StateUnavailable
from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy, RetryPolicy, TopicSpec
from popgate.ports.catalog import Catalog

T = TypeVar("T")
Fields = dict[str, Any]


class SqliteCatalog:
    """The state port's catalog half on ``database``, which the caller opens and closes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def topics(self) -> list[TopicSpec]:
        rows = await self._read("SELECT name, spec FROM topic ORDER BY name")
        return [_topic_spec(name, orjson.loads(spec)) for name, spec in rows]

    async def groups(self) -> list[GroupSpec]:
        rows = await self._read("SELECT topic, name, spec FROM topic_group ORDER BY topic, name")
        return [_group_spec(Subscription(topic, name), orjson.loads(spec)) for topic, name, spec in rows]

    async def put_topic(self, spec: TopicSpec) -> None:
        row = (spec.topic, _json(spec, without="topic"))
        await self._write(lambda connection: connection.execute("REPLACE INTO topic VALUES (?, ?)", row))

    async def delete_topic(self, topic: TopicName) -> None:
        def job(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM topic_group WHERE topic = ?", (topic,))
            connection.execute("DELETE FROM topic WHERE name = ?", (topic,))

        await self._write(job)

    async def put_group(self, spec: GroupSpec) -> None:
        row = (*spec.subscription, _json(spec, without="subscription"))
        await self._write(lambda connection: connection.execute("REPLACE INTO topic_group VALUES (?, ?, ?)", row))

    async def delete_group(self, subscription: Subscription) -> None:
        await self._write(
            lambda connection: connection.execute("DELETE FROM topic_group WHERE topic = ? AND name = ?", subscription)
        )

    async def _write(self, job: Callable[[sqlite3.Connection], object]) -> None:
        await self._database.write(job, StateUnavailable)

    async def _read(self, sql: str) -> list[tuple[Any, ...]]:
        return await self._database.read(lambda connection: connection.execute(sql).fetchall(), StateUnavailable)


def _json(spec: TopicSpec | GroupSpec, *, without: str) -> str:
    """The fields of ``spec`` but for its name, which is the row's key."""
    fields = asdict(spec)
    del fields[without]
    return orjson.dumps(fields).decode()


def _topic_spec(name: str, fields: Fields) -> TopicSpec:
    fields["adopted"] = tuple(fields.get("adopted", ()))
    return TopicSpec(topic=TopicName(name), **fields)


def _group_spec(subscription: Subscription, fields: Fields) -> GroupSpec:
    policy: Fields = fields.pop("policy", {})
    policy["retry"] = RetryPolicy(**policy.get("retry", {}))
    fields["mode"] = ConsumeMode(fields.get("mode", ConsumeMode.POP))
    return GroupSpec(subscription=subscription, policy=Policy(**policy), **fields)


_conforms: type[Catalog] = SqliteCatalog
