"""Defines the queue-host port: the commands with which the cluster controls the engine's queues."""

from collections.abc import Collection
from typing import Protocol

from popgate.domain.names import BrokerQueue


class QueueHosts(Protocol):
    """Serves the queues that the cluster assigns to this proxy. All calls are idempotent, and ignore deleted queues."""

    def queues(self) -> Collection[BrokerQueue]:
        """Return all queues that need an owner."""
        ...

    def served(self) -> Collection[BrokerQueue]:
        """Return the queues that this proxy serves now: it owns them, and has a valid claim on them."""
        ...

    def lost(self) -> Collection[BrokerQueue]:
        """Return the queues that this proxy served until the store lost its data. ``take`` must be called for them
        again."""
        ...

    async def take(self, queue: BrokerQueue) -> None:
        """Begin to serve a queue that this proxy owns now. After a loss of data, first write back the queue's records.

        Raises: StateUnavailable.
        """
        ...

    async def hand_over(self, queue: BrokerQueue) -> None:
        """Stop serving the queue, so that another proxy can own it.

        Grant no more leases, finish pending writes, and return the buffered messages to the broker in order.
        """
        ...

    def data_lost(self) -> None:
        """Handle that the store lost its data: grant no lease from a queue until ``take`` is called for it again.

        Each queue's state stays in memory, so that ``take`` can write it back.
        """
        ...

    def review(self) -> None:
        """Check soon whether a member that is gone has settled buffered messages without reporting this to this
        proxy."""
        ...

    def lose(self, queue: BrokerQueue) -> None:
        """Stop serving the queue at once, because another proxy already owns it.

        Forget all state of the queue, and return the buffered messages to the broker.
        """
        ...
