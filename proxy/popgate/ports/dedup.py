"""The state port's dedup half: which ``dedup_id`` of a topic was published as which copy.

Theory of operation. A publish reserves its ids first, then publishes, then confirms (design: section 2, "Publish dedup
goes pending, then confirmed").

             reserve                confirm
    (none) ----------> pending ---------------> confirmed
       ^                  |  \\ reserve again: the same copy, published once more
       |     cancel       |
       +------------------+     every entry ends ``window_seconds`` after it was first reserved

What was begun and not confirmed, because a process died or a broker did not answer, may or may not be stored. Whoever
repeats it publishes the *same copy* to the same queue: it then stands there once, or twice with one identity, and the
lease records give it to consumers once. So that they still do when the second one comes much later, the store notes
such a copy: ``LeaseStore.trim`` keeps its settled records.

The store holds one small entry for each id of the last ``window_seconds`` and those that ``collect`` has not reached
yet, on disk and none in memory: its size is bounded by the rate of publishes. Every call is one atomic step on one
topic, in the store's clock, and fits in a script: no entry depends on another one.
All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from popgate.domain.names import CopyId, TopicName
from popgate.ports.broker import Outgoing


class DedupEntry(NamedTuple):
    """One id, and the copy that stands for it: where it is new, the one to publish."""

    dedup_id: str
    copy_id: CopyId
    message_id: str
    queue_index: int


class Standing(NamedTuple):
    """What an id stood for already. Confirmed: it is stored, so a repeat is a duplicate. Otherwise it was begun, and
    nobody knows how it ended: publish this copy once more."""

    entry: DedupEntry
    is_confirmed: bool


class DedupStore(Protocol):
    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Standing]:
        """What stood already, by id; no two entries have the same id. Under every other id the copy of its entry is the
        one to publish. A call that is repeated with the same entries gets the same answer. A copy that is answered as
        begun is noted as one that may stand at the broker twice."""
        ...

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """The broker has stored these copies. An id that stands for another copy by now stays as it is."""
        ...

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """The broker has surely not stored these copies: forget those that are pending and that nobody repeated."""
        ...

    async def drop_topic(self, topic: TopicName) -> None:
        """The topic was deleted: forget its ids."""
        ...

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        """Drop the entries that have ended, and notes that are older than ``noted_seconds``, in bites. Returns how
        many entries."""
        ...


class AtomicPublisher(Protocol):
    """A broker that is one with the dedup store: it needs no way from pending to confirmed."""

    async def publish_new(self, topic: TopicName, messages: Sequence[Outgoing], entries: Sequence[DedupEntry]) -> bool:
        """Store messages and the ids that some of them have, confirmed, in one step. False: nothing was changed, for
        one of the ids stands for something already, or one of the messages can't be stored.

        Raises: BrokerUnavailable; then nothing was changed.
        """
        ...
