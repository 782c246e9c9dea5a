"""Defines the dedup part of the state port: the copy under which each ``dedup_id`` of a topic was published.

Theory of operation. A publish reserves its ids first, then publishes, then confirms (decision 6).

             reserve                confirm
    (none) ----------> pending ---------------> confirmed
       ^                  |  \\ reserve again: the same copy, published once more
       |     cancel       |
       +------------------+     every entry ends ``window_seconds`` after it was first reserved

If a process died or a broker did not answer, a publish stays pending: its copy may or may not be stored. A repeated
publish sends the *same copy* to the same queue. The queue then has the copy once, or twice with one identity, and the
lease records ensure that it is consumed once. The store notes such a copy, and ``LeaseStore.trim`` keeps its settled
records, so that this holds even if the second delivery is much later.

The store holds one small entry for each id of the last ``window_seconds``, and the older ones that ``collect`` has not
reached yet. The rate of publishes bounds its size. Every call is one atomic step on one topic and uses the
store's clock. Entries do not depend on each other, so one Redis script can implement a call.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.names import CopyId, TopicName
from popgate.ports.broker import Outgoing


class DedupEntry(NamedTuple):
    """One id and its copy; if the id is new, the copy to publish."""

    dedup_id: str
    copy_id: CopyId
    message_id: str
    queue_index: int


class Reservation(NamedTuple):
    """An id that was reserved before.

    If it is confirmed, its copy is stored, and a repeat is a duplicate. Otherwise it is pending with unknown outcome:
    publish this copy again.
    """

    entry: DedupEntry
    is_confirmed: bool


class DedupStore(Protocol):
    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Reservation]:
        """Reserve ids, and return the ids that were reserved before, with their copies.

        No two entries may have the same id. For every other id, publish the copy of its entry. A repeated call with the
        same entries gets the same answer. A copy that is returned as pending is noted as possibly stored twice at the
        broker.
        """
        ...

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Confirm that the broker has stored these copies. An id that has another copy stays unchanged."""
        ...

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Forget these copies, which the broker certainly has not stored, if they are pending and were not repeated."""
        ...

    async def drop_topic(self, topic: TopicName) -> None:
        """Forget the ids of a deleted topic."""
        ...

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        """Drop entries that have ended, and notes older than ``noted_seconds``, in several steps.

        Returns the number of entries dropped.
        """
        ...


class AtomicPublisher(Protocol):
    """A broker that shares its storage with the dedup store: it stores a message and its confirmed id in one step."""

    async def publish_new(self, topic: TopicName, messages: Sequence[Outgoing], entries: Sequence[DedupEntry]) -> bool:
        """Store messages, and the ids of those that have one as confirmed, in one atomic step.

        Returns False if nothing was changed because one of the ids is already in use or one of the messages can't be
        stored. Raises: BrokerUnavailable. In this case nothing was changed.
        """
        ...
