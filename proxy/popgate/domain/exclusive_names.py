"""Gives a name to one connection at a time, even after the node of the connection that had it is lost.

A name is an exclusive queue of RabbitMQ, which ends with its connection. But if RabbitMQ keeps its metadata in Khepri
(always, from 4.3 on), the queues of a lost node stay declared and locked until that node comes back or is removed from
the cluster, which may never happen. So each name has substitutes. A client takes the first one that is free and passes
over those whose node is lost:

    name, substitute 1, substitute 2, ...
    lost  lost          taken

A lost node that comes back frees its names, so two clients could take different substitutes. Therefore a client that
has taken one looks at all the others, and gives its own back if one of them is alive. Every client takes before it
looks, so of two clients that do this at the same time at least one sees the other.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class NameState(Enum):
    """The state of a name, as a client without the name sees it."""

    FREE = "free"
    ALIVE = "alive"
    """Another connection has it, or its state is unknown."""
    LOST = "lost"
    """The connection that had it was on a node that is lost."""


class ExclusiveNames(Protocol):
    """The broker's calls on names."""

    async def declare(self, name: str) -> bool:
        """Take the name; False if it is not free."""
        ...

    async def look(self, names: Sequence[str]) -> Sequence[NameState]:
        """Return the state of each name."""
        ...

    async def delete(self, name: str) -> None:
        """Give the name back."""
        ...


async def take_first(names: Sequence[str], asked: ExclusiveNames, *, passes_over_lost: bool = True) -> str | None:
    """Take one of ``names``, which are substitutes for one another; None if another client has one.

    Without ``passes_over_lost`` only the first one can be taken, which makes a refusal cheaper. Errors of the broker
    propagate; a name that was taken before the error is given back when the connection ends.
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
