"""The queue-host port: what the cluster tells the engine to do with its queues."""

from collections.abc import Collection
from typing import Protocol

from popgate.domain.names import BrokerQueue


class QueueHosts(Protocol):
    """All calls are idempotent, and those on a queue that exists no more do nothing."""

    def queues(self) -> Collection[BrokerQueue]:
        """All that have to be consumed by somebody."""
        ...

    def served(self) -> Collection[BrokerQueue]:
        """Those that this proxy serves now: it was told to take them, could do so, and has not given them up."""
        ...

    def lost(self) -> Collection[BrokerQueue]:
        """Those that it served until the store lost its data: they have to be taken once more."""
        ...

    async def take(self, queue: BrokerQueue) -> None:
        """This proxy owns the queue: serve it. After a loss of data: once its records are written back. Raises:
        StateUnavailable."""
        ...

    async def hand_over(self, queue: BrokerQueue) -> None:
        """Stop handing out, finish what is being written, give back what is held, in order. Then it is nobody's."""
        ...

    def data_lost(self) -> None:
        """The store has lost its data: hand out nothing more of a queue until it is taken again, and keep what is known
        of it, to be written back then."""
        ...

    def review(self) -> None:
        """A member has gone, who may have settled what this proxy holds without having told it: look it up, soon."""
        ...

    def lose(self, queue: BrokerQueue) -> None:
        """It belongs to somebody else already: forget what is known of it, and give back what is held."""
        ...
