"""The state port's part for pull clients: which of them have sessions, and who has which queue.

One document a subscription, written whole, and only by who has read what it replaces: one proxy arranges a
subscription's queues at a time, and one that was overtaken finds out when it writes. When clients were heard of last is
not kept here: who arranges next gives each of them its whole time anew, so that a session outlives the proxy that knew
of it, and a heartbeat writes nothing.

All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed.
"""

from typing import NamedTuple, Protocol

from popgate.domain.assignment import Assignment
from popgate.domain.names import Subscription


class StoredAssignment(NamedTuple):
    """``version`` is another one after every change; 0 where nothing stands, and the assignment is an empty one."""

    version: int
    assignment: Assignment


NOTHING_STORED = StoredAssignment(0, Assignment())


class Assignments(Protocol):
    async def read(self, subscription: Subscription) -> StoredAssignment: ...

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        """Put it in the place of version ``replaces``: the new version; None where another one stands, and nothing was
        changed."""
        ...

    async def drop(self, subscription: Subscription) -> None:
        """Forget a deleted subscription. Idempotent."""
        ...
