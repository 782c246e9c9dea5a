"""Defines the state port's part for pull clients: their sessions, and the client that holds each queue.

There is one document per subscription. A write replaces the whole document, and succeeds only if the stored version is
the version that the writer has read. One proxy at a time assigns a subscription's queues. If another proxy has taken
over, the write of the former one fails. The time of a client's last heartbeat is not stored: the next proxy gives each
client its full session time again. So a session outlives the proxy that served it, and a heartbeat writes nothing.

All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from typing import NamedTuple, Protocol

from popgate.domain.assignment import Assignment
from popgate.domain.names import Subscription


class StoredAssignment(NamedTuple):
    """An assignment and its ``version``, which differs after every change. Version 0: nothing is stored, and the
    assignment is empty."""

    version: int
    assignment: Assignment


NOTHING_STORED = StoredAssignment(0, Assignment())


class Assignments(Protocol):
    async def read(self, subscription: Subscription) -> StoredAssignment: ...

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        """Replace version ``replaces``, and return the new version. If another version is stored, return None."""
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Forget a deleted subscription. Idempotent."""
        ...
