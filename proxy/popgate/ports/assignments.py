"""Defines the part of the state port for pull clients: their sessions, and the client that holds each queue.

There is one document per subscription. A write replaces the whole document, and succeeds only if the stored version is
the version that the writer has read. One proxy at a time assigns the queues of a subscription. If another proxy has
taken over this task, the writes of the former proxy fail. The store does not contain the time of a client's last
heartbeat, so heartbeats write nothing. A proxy that takes over restarts the session timeout of each client. So sessions
continue when their proxy ends.

All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from typing import NamedTuple, Protocol

from popgate.domain.assignment import Assignment
from popgate.domain.names import Subscription


class StoredAssignment(NamedTuple):
    """A stored assignment and its ``version``, which is different after every change.

    Version 0 means that nothing is stored. In this case the assignment is empty.
    """

    version: int
    assignment: Assignment


NOTHING_STORED = StoredAssignment(0, Assignment())


class Assignments(Protocol):
    async def read(self, subscription: Subscription) -> StoredAssignment: ...

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        """Replace version ``replaces``, and return the new version. If another version is stored, return None."""
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Delete the assignment of a deleted subscription. Idempotent."""
        ...
