"""Implements the catalog on SQLite, with one JSON row for each topic and each group."""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any

from popgate.adapters.spec_json import SpecReader, group_json, topic_json
from popgate.adapters.sqlite.database import Database
from popgate.domain.errors import StateUnavailable
from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec
from popgate.ports.catalog import Catalog, Unreadable


class SqliteCatalog:
    """Implements the port ``Catalog`` on ``database``. The caller opens and closes ``database``.

    No other process uses the database, so all changes of the catalog are made by this object.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reader = SpecReader()
        self._version = 0

    async def topics(self) -> list[TopicSpec]:
        return self._reader.topics(await self._read("SELECT name, spec FROM topic ORDER BY name"))

    async def groups(self) -> list[GroupSpec]:
        rows = await self._read("SELECT topic, name, spec FROM topic_group ORDER BY topic, name")
        return self._reader.groups(rows, await self.topics())

    def unreadable(self) -> Unreadable:
        return self._reader.unreadable

    async def put_topic(self, spec: TopicSpec, version: int | None = None) -> int:
        def job(connection: sqlite3.Connection) -> bool:
            present = connection.execute("SELECT spec FROM topic WHERE name = ?", (spec.topic,)).fetchone()
            self._reader.check_topic(spec.topic, None if present is None else present[0])
            if not self._has(version):
                return False
            connection.execute("REPLACE INTO topic VALUES (?, ?)", (spec.topic, topic_json(spec)))
            return True

        return await self._change(job)

    async def delete_topic(self, topic: TopicName) -> None:
        def job(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM topic_group WHERE topic = ?", (topic,))
            connection.execute("DELETE FROM topic WHERE name = ?", (topic,))

        await self._write(job)

    async def group(self, subscription: Subscription) -> GroupSpec | None:
        text = await self._database.read(lambda connection: _text(connection, subscription), StateUnavailable)
        return self._reader.group(subscription, text)

    async def change_group(self, before: GroupSpec | None, after: GroupSpec, version: int | None = None) -> int:
        def job(connection: sqlite3.Connection) -> bool:
            present = _text(connection, after.subscription)
            self._reader.check_group(after.subscription, present)
            if self._reader.group(after.subscription, present) != before or not self._has(version):
                return False
            row = (*after.subscription, group_json(after))
            connection.execute("REPLACE INTO topic_group VALUES (?, ?, ?)", row)
            return True

        return await self._change(job)

    async def delete_group(self, subscription: Subscription) -> None:
        await self._write(
            lambda connection: connection.execute("DELETE FROM topic_group WHERE topic = ? AND name = ?", subscription)
        )

    async def now(self) -> float:
        return self._database.now()

    async def version(self) -> int:
        return self._version

    async def changed(self) -> None:
        await asyncio.get_running_loop().create_future()  # no other process changes the catalog

    def _has(self, version: int | None) -> bool:
        return version is None or version == self._version

    async def _change(self, job: Callable[[sqlite3.Connection], bool]) -> int:
        if not await self._database.write(job, StateUnavailable):
            return 0
        self._version += 1
        return self._version

    async def _write(self, job: Callable[[sqlite3.Connection], object]) -> None:
        await self._database.write(job, StateUnavailable)
        self._version += 1

    async def _read(self, sql: str) -> list[tuple[Any, ...]]:
        return await self._database.read(lambda connection: connection.execute(sql).fetchall(), StateUnavailable)


def _text(connection: sqlite3.Connection, subscription: Subscription) -> str | None:
    row = connection.execute("SELECT spec FROM topic_group WHERE topic = ? AND name = ?", subscription).fetchone()
    return None if row is None else row[0]


_conforms: type[Catalog] = SqliteCatalog
