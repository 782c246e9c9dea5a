"""Assigns a name to one connection at a time, even after the node of the connection that had the name is lost.

A name is the name of an exclusive queue of RabbitMQ, which RabbitMQ deletes when the connection ends. But if RabbitMQ
stores its metadata in Khepri (it always does from 4.3 on), the exclusive queues of a lost node stay declared and locked
until that node returns or is removed from the cluster. This may never happen. So each name has substitutes. A client
takes the first of these names that is free, and passes over the names whose node is lost:

    name, substitute 1, substitute 2, ...
    lost  lost          taken

When a lost node returns, its names become free, so two clients could take different substitutes of one name. Therefore
a client that has taken a name then checks all other names, and releases its own name if another connection has one of
them. Every client takes a name before it checks the others. So if two clients do this at the same time, at least one of
them sees the name of the other.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class NameState(Enum):
    """The state of a name, as seen by a client that has not taken the name."""

    FREE = "free"
    ALIVE = "alive"
    """Another connection has the name, or the state of the name is unknown."""
    LOST = "lost"
    """The connection that had the name was on a node that is lost."""


class ExclusiveNames(Protocol):
    """The calls with which a client takes, checks and releases names on the broker."""

    async def declare(self, name: str) -> bool:
        """Take the name and return True. Return False if the name is not free."""
        ...

    async def look(self, names: Sequence[str]) -> Sequence[NameState]:
        """Return the state of each name."""
        ...

    async def delete(self, name: str) -> None:
        """Release the name."""
        ...


async def take_first(names: Sequence[str], asked: ExclusiveNames, *, passes_over_lost: bool = True) -> str | None:
    """Take one of ``names``, which are substitutes for one another, and return it.

    Return None if no name is free, or if another client has one of them. Without ``passes_over_lost``, only the first
    name can be taken, which makes a refusal cheaper. Errors of the broker propagate. A name that was taken before the
    error is released when the connection ends.
    """
    for taken in names if passes_over_lost else names[:1]:
        if await asked.declare(taken):
            break
    else:
        return None
    others = [name for name in names if name != taken]
    if others and NameState.ALIVE in await asked.look(others):
        await asked.delete(taken)
        return None
    return taken
