"""Gives a name to one connection at a time, also after the node of the connection that had it is lost.

A name is an exclusive queue of RabbitMQ. It ends with its connection. But where RabbitMQ keeps its metadata in Khepri
(from 4.3 on always), the queues of a lost node stay declared and locked until that node comes back or is removed from
the cluster, which may be never. So each name has substitutes. A client takes the first of them that can be had, passing
over those whose node is lost:

    name, substitute 1, substitute 2, ...
    lost  lost          taken

A lost node that comes back sets its names free, so two clients could take different ones. Therefore a client that has
taken one looks at all the others, and gives it back where one of them is alive. Of two clients that do so at the same
time, each takes before it looks: at least one of them sees the other.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class NameState(Enum):
    """What a client that has not got a name sees of it."""

    FREE = "free"
    ALIVE = "alive"
    """Another connection has it, or it can't be told."""
    LOST = "lost"
    """A connection had it whose node is lost."""


class ExclusiveNames(Protocol):
    """What a client can ask the broker of names."""

    async def declare(self, name: str) -> bool:
        """Have it from now on; False where it is not free."""
        ...

    async def look(self, names: Sequence[str]) -> Sequence[NameState]:
        """The state of each."""
        ...

    async def delete(self, name: str) -> None:
        """Give it back."""
        ...


async def take_first(names: Sequence[str], asked: ExclusiveNames, *, passes_over_lost: bool = True) -> str | None:
    """Have one of ``names``, which are substitutes for one another; None where another client has one.

    Without ``passes_over_lost`` only the first one can be had, which costs less where it can't. What the broker raises
    goes through; a name that was taken then is given back by the end of the connection.
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
