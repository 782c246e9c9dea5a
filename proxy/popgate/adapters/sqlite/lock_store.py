"""The lock store on SQLite: one row a definition, and one that says how far fencing tokens were given."""

import sqlite3

from popgate.adapters.sqlite.database import Database
from popgate.domain.errors import StateUnavailable
from popgate.domain.locks import LockDefinition, LockKind
from popgate.ports.lock_store import LockStore


class SqliteLockStore:
    """The state port's locks half on ``database``, which the caller opens and closes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def definitions(self) -> list[LockDefinition]:
        sql = "SELECT name, kind, slots, enabled, by_use FROM lock_definition ORDER BY name"
        rows = await self._database.read(lambda connection: connection.execute(sql).fetchall(), StateUnavailable)
        return [
            LockDefinition(name=name, kind=LockKind(kind), slots=slots, enabled=bool(enabled), by_use=bool(by_use))
            for name, kind, slots, enabled, by_use in rows
        ]

    async def put(self, definition: LockDefinition) -> None:
        row = (definition.name, definition.kind, definition.slots, definition.enabled, definition.by_use)
        sql = "REPLACE INTO lock_definition (name, kind, slots, enabled, by_use) VALUES (?, ?, ?, ?, ?)"
        await self._database.write(lambda connection: connection.execute(sql, row), StateUnavailable)

    async def delete(self, name: str) -> None:
        sql = "DELETE FROM lock_definition WHERE name = ?"
        await self._database.write(lambda connection: connection.execute(sql, (name,)), StateUnavailable)

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        def job(connection: sqlite3.Connection) -> int:
            sql = "UPDATE lock_fence SET next_token = max(next_token, ?) + ? RETURNING next_token"
            (next_token,) = connection.execute(sql, (at_least, count)).fetchone()
            return int(next_token) - count

        return await self._database.write(job, StateUnavailable)


_conforms: type[LockStore] = SqliteLockStore
