"""Defines the dedup part of the state port: the copy under which each ``dedup_id`` of a topic was published.

Theory of operation. A publish reserves its ids first, then publishes, then confirms (decision 6).

             reserve                confirm
    (none) ----------> pending ---------------> confirmed
       ^                  |  \\ reserve again: the same copy, published once more
       |     cancel       |
       +------------------+     every entry ends ``window_seconds`` after it was first reserved

If a process dies or the broker does not answer, an id stays pending: the broker may or may not have stored its copy. A
repeated publish with the same id sends the *same copy* to the same queue. The queue then has the copy once, or twice
with the same copy id, and the lease records ensure that it is consumed once. The store records that the copy may be
stored twice. ``LeaseStore.trim`` then does not delete the settled record of the copy, so that the copy is consumed only
once even if its second delivery is much later.

The store contains one small entry for each id that was reserved in the last ``window_seconds``, and older entries that
``collect`` has not yet deleted. So the rate of publishes limits the size of the store. ``reserve``, ``confirm`` and
``cancel`` are each one atomic step on one topic, and use the store's clock. Entries do not depend on each other, so one
Redis script can implement such a call.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.names import CopyId, TopicName
from popgate.ports.broker import Outgoing


class DedupEntry(NamedTuple):
    """A ``dedup_id`` and the copy under which it is published. For a new id, this is the copy to publish."""

    dedup_id: str
    copy_id: CopyId
    message_id: str
    queue_index: int


class Reservation(NamedTuple):
    """An id that was reserved before.

    If ``is_confirmed``, the broker has stored the copy of ``entry``, and a repeated publish is a duplicate. Otherwise
    the id is pending, and the broker may not have stored this copy: publish the same copy again.
    """

    entry: DedupEntry
    is_confirmed: bool


class DedupStore(Protocol):
    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Reservation]:
        """Reserve the ids of ``entries``, and return the ids that were reserved before, with their copies.

        No two entries may have the same id. For each id that is not returned, publish the copy of its entry. A repeated
        call with the same entries gets the same answer. If a returned copy is pending, the store records that the
        broker may store this copy twice.
        """
        ...

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Confirm that the broker has stored these copies. An id that has another copy stays unchanged."""
        ...

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Delete the reservations of copies that the broker certainly has not stored.

        A reservation that is confirmed, or that was returned by a later ``reserve``, stays unchanged.
        """
        ...

    async def drop_topic(self, topic: TopicName) -> None:
        """Delete all ids of a deleted topic."""
        ...

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        """Delete ended entries, and records of possible second copies that are older than ``noted_seconds``.

        An entry ends ``window_seconds`` after it was first reserved. The call works in several steps, and returns the
        number of deleted entries.
        """
        ...


class AtomicPublisher(Protocol):
    """A broker that shares its storage with the dedup store: it stores a message and its confirmed id in one step."""

    async def publish_new(self, topic: TopicName, messages: Sequence[Outgoing], entries: Sequence[DedupEntry]) -> bool:
        """Store ``messages``, and the ids of ``entries`` as confirmed, in one atomic step.

        Return False, and change nothing, if one of the ids is already in use, one of the messages can't be stored, or
        the messages are too large for one step.
        Raises: BrokerUnavailable; in this case nothing was changed, either.
        """
        ...
