"""Implements the lock store on SQLite, with one row for each lock definition and one row for the next fencing token."""

import sqlite3
from dataclasses import astuple
from typing import Any

from popgate.adapters.sqlite.database import Database
from popgate.domain.errors import StateUnavailable
from popgate.domain.locks import LockDefinition, LockKind
from popgate.ports.lock_store import LockStore

_COLUMNS = "name, kind, slots, enabled, by_use, deleted"


class SqliteLockStore:
    """Implements the port ``LockStore`` on ``database``. The caller opens and closes ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def definitions(self) -> list[LockDefinition]:
        sql = f"SELECT {_COLUMNS} FROM lock_definition ORDER BY name"
        rows = await self._database.read(lambda connection: connection.execute(sql).fetchall(), StateUnavailable)
        return [_read(row) for row in rows]

    async def find(self, name: str) -> LockDefinition | None:
        row = await self._database.read(lambda connection: _row(connection, name), StateUnavailable)
        return None if row is None else _read(row)

    async def put(self, definition: LockDefinition) -> None:
        sql = f"REPLACE INTO lock_definition ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
        await self._database.write(lambda connection: connection.execute(sql, _values(definition)), StateUnavailable)

    async def add(self, definition: LockDefinition) -> LockDefinition:
        def job(connection: sqlite3.Connection) -> tuple[Any, ...]:
            sql = f"INSERT OR IGNORE INTO lock_definition ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
            connection.execute(sql, _values(definition))
            row = _row(connection, definition.name)
            assert row is not None, "it has just been added"
            return row

        return _read(await self._database.write(job, StateUnavailable))

    async def delete(self, name: str) -> None:
        sql = "DELETE FROM lock_definition WHERE name = ?"
        await self._database.write(lambda connection: connection.execute(sql, (name,)), StateUnavailable)

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        def job(connection: sqlite3.Connection) -> int:
            sql = "UPDATE lock_fence SET next_token = max(next_token, ?) + ? RETURNING next_token"
            (next_token,) = connection.execute(sql, (at_least, count)).fetchone()
            return int(next_token) - count

        return await self._database.write(job, StateUnavailable)


def _row(connection: sqlite3.Connection, name: str) -> tuple[Any, ...] | None:
    row: tuple[Any, ...] | None = connection.execute(
        f"SELECT {_COLUMNS} FROM lock_definition WHERE name = ?", (name,)
    ).fetchone()
    return row


def _values(definition: LockDefinition) -> tuple[object, ...]:
    return astuple(definition)


def _read(row: tuple[Any, ...]) -> LockDefinition:
    name, kind, slots, *flags = row
    enabled, by_use, deleted = map(bool, flags)
    return LockDefinition(name=name, kind=LockKind(kind), slots=slots, enabled=enabled, by_use=by_use, deleted=deleted)


_conforms: type[LockStore] = SqliteLockStore
