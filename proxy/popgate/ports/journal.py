"""Defines the journal port, which receives all delivery events (decision 20).

The engine reports events synchronously, in batches of one kind. An adapter must copy the data that it needs, must not
raise and must not block.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName


class EventKind(StrEnum):
    PUBLISHED = "published"
    DUPLICATE = "duplicate"
    """The message's dedup_id was published before, so nothing was stored. The subject is the earlier copy."""
    DELIVERED = "delivered"
    ACKED = "acked"
    RELEASED = "released"
    EXTENDED = "extended"
    EXPIRED = "expired"
    REJECTED = "rejected"
    DEAD_LETTERED = "dead_lettered"
    REDRIVEN = "redriven"
    """A dead letter was sent back to its own queue or to another topic."""
    PURGED = "purged"
    """An admin deleted a dead letter or a message of a subscription."""
    DISCARDED = "discarded"
    """The message's time to live ended while it was not leased."""
    FOUND_SETTLED = "found_settled"
    """The store reported that the message was settled before: an ack was repeated, or the copy was delivered again.

    The event of the earlier settlement may be missing, if the store's answer to it was lost. The detail of this event
    is the state of the lease record.
    """
    REDELIVERED = "redelivered"
    """The broker redelivered the message after a channel ended, while its lease was valid. The lease continues."""
    GROUP_CREATED = "group_created"
    GROUP_DELETED = "group_deleted"
    """The group was deleted with all its messages."""
    TOPIC_DELETED = "topic_deleted"
    MODE_CHANGED = "mode_changed"
    QUEUE_CLAIMED = "queue_claimed"
    QUEUE_RELEASED = "queue_released"
    JOURNAL_STARTED = "journal_started"
    JOURNAL_LOST = "journal_lost"
    """Events before this event are missing. The detail is the number of missing events."""


TOPIC_EVENTS = frozenset({EventKind.PUBLISHED, EventKind.DUPLICATE})
"""Events of publishes, which concern no single group. They are recorded under the name of the default group."""
EVENTS_WITHOUT_MESSAGE = frozenset(
    {
        EventKind.GROUP_CREATED,
        EventKind.GROUP_DELETED,
        EventKind.TOPIC_DELETED,
        EventKind.MODE_CHANGED,
        EventKind.QUEUE_CLAIMED,
        EventKind.QUEUE_RELEASED,
        EventKind.JOURNAL_STARTED,
        EventKind.JOURNAL_LOST,
    }
)
"""Events that are reported by ``Journal.note``, not by ``Journal.record``. /metrics does not count them."""


class JournalSubject(Protocol):
    """The message that an event is about.

    ``delivery_count`` is 0, and ``leased_at`` (Unix seconds) is 0.0, before the first delivery. ``client``: the client
    that has or had the lease; None if this process does not know it. ``invisibility_seconds``: the duration for which
    the lease was granted; 0.0 if there is no lease, or if this process does not know the duration.
    """

    @property
    def copy_id(self) -> CopyId: ...
    @property
    def message(self) -> Message | None:
        """The message; None if this process no longer has its body."""
        ...

    @property
    def queue_index(self) -> int: ...
    @property
    def delivery_count(self) -> int: ...
    @property
    def leased_at(self) -> float: ...
    @property
    def client(self) -> str | None: ...
    @property
    def invisibility_seconds(self) -> float: ...


class Journal(Protocol):
    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[JournalSubject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        """Record that ``kind`` happened to each of ``subjects`` at ``at`` (Unix seconds).

        ``details`` and ``new_copy_ids``, if given, have one element per subject: the reason of the event, and the id of
        the copy that replaces the subject. ``groups``: the groups that will receive the published messages. The
        sequences do not change after the call, but the subjects may change.
        """
        ...

    def note(
        self,
        kind: EventKind,
        topic: TopicName,
        at: float,
        *,
        group: GroupName | None = None,
        queue_index: int | None = None,
        detail: str = "",
    ) -> None:
        """Record that ``kind`` happened to a topic, a group or a queue, at ``at`` (Unix seconds)."""
        ...
