"""Stores the assignments of pull clients in SQLite, with one row for each subscription."""

import sqlite3

from popgate.adapters.assignment_json import assignment_json, read_assignment
from popgate.adapters.sqlite.database import Database
from popgate.domain.assignment import Assignment
from popgate.domain.errors import StateUnavailable
from popgate.domain.names import Subscription
from popgate.ports.assignments import NOTHING_STORED, Assignments, StoredAssignment

_OF = "topic = ? AND name = ?"


class SqliteAssignments:
    """Implements the port ``Assignments`` on ``database``. The caller opens and closes ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, subscription: Subscription) -> StoredAssignment:
        sql = f"SELECT version, assignment FROM pull_assignment WHERE {_OF}"
        row = await self._database.read(lambda c: c.execute(sql, subscription).fetchone(), StateUnavailable)
        return NOTHING_STORED if row is None else StoredAssignment(row[0], read_assignment(row[1]))

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        def job(connection: sqlite3.Connection) -> int | None:
            row = connection.execute(f"SELECT version FROM pull_assignment WHERE {_OF}", subscription).fetchone()
            if (0 if row is None else row[0]) != replaces:
                return None
            version = max(replaces + 1, int(self._database.now() * 1000))  # never reuse a version, even after ``drop``
            values = (*subscription, version, assignment_json(assignment))
            connection.execute("REPLACE INTO pull_assignment VALUES (?, ?, ?, ?)", values)
            return version

        return await self._database.write(job, StateUnavailable)

    async def drop(self, subscription: Subscription) -> None:
        sql = f"DELETE FROM pull_assignment WHERE {_OF}"
        await self._database.write(lambda connection: connection.execute(sql, subscription), StateUnavailable)


_conforms: type[Assignments] = SqliteAssignments
