"""Defines the queue-host port: the commands with which the cluster controls the engine's queues."""

from collections.abc import Collection
from typing import Protocol

from popgate.domain.names import BrokerQueue


class QueueHosts(Protocol):
    """Serves the queues that the cluster assigns. All calls are idempotent, and do nothing for a deleted queue."""

    def queues(self) -> Collection[BrokerQueue]:
        """Return all queues that need an owner."""
        ...

    def served(self) -> Collection[BrokerQueue]:
        """Return the queues that this proxy serves now: it has taken them and not given them up."""
        ...

    def lost(self) -> Collection[BrokerQueue]:
        """Return the queues that this proxy served until the store lost its data. The proxy must take them again."""
        ...

    async def take(self, queue: BrokerQueue) -> None:
        """Serve the queue, which this proxy owns now. After a loss of data, first write back its records.

        Raises: StateUnavailable.
        """
        ...

    async def hand_over(self, queue: BrokerQueue) -> None:
        """Stop granting, finish pending writes, and give back buffered messages in order, so that another proxy can own
        the queue."""
        ...

    def data_lost(self) -> None:
        """Handle that the store lost its data: grant nothing from a queue until it is taken again.

        Keep the queue's state, to write it back when the queue is taken.
        """
        ...

    def review(self) -> None:
        """Check soon whether a member that is gone has settled buffered messages without reporting it to this proxy."""
        ...

    def lose(self, queue: BrokerQueue) -> None:
        """Forget all state of the queue, which has another owner already, and give back its buffered messages."""
        ...
