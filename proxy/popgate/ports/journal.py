"""Defines the journal port, which receives all delivery events (decision 20).

The engine reports a batch of one kind at a time, synchronously. An adapter must copy what it needs, must not raise and
must not block.
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
    """The store already had the message as settled: an ack was repeated, or the copy was delivered again. The event of
    the settlement itself may be missing if the store's answer was lost. The detail is the record's state."""
    REDELIVERED = "redelivered"
    """The broker redelivered the message after a channel ended, and it was attached to its valid lease."""
    GROUP_CREATED = "group_created"
    GROUP_DELETED = "group_deleted"
    """The group was deleted with all its messages."""
    TOPIC_DELETED = "topic_deleted"
    MODE_CHANGED = "mode_changed"
    QUEUE_CLAIMED = "queue_claimed"
    QUEUE_RELEASED = "queue_released"
    JOURNAL_STARTED = "journal_started"
    JOURNAL_LOST = "journal_lost"
    """Events before this one are missing; the detail is their number."""


TOPIC_EVENTS = frozenset({EventKind.PUBLISHED, EventKind.DUPLICATE})
"""Events of publishers, which belong to no group: recorded under the default group's name."""
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
"""Events reported by ``note``, not by ``record``; they are not counted for /metrics."""


class JournalSubject(Protocol):
    """The message that an event is about.

    ``delivery_count`` is 0 and ``leased_at`` (Unix seconds) 0.0 before the first delivery. ``client``: the client that
    has or had it; None if unknown here. ``invisibility_seconds``: the duration of its lease when granted; 0.0 if there
    is none or it is unknown here.
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

        ``details`` and ``new_copy_ids``, if given, have one element per subject: the reason, and the copy that replaces
        it. ``groups``: the groups that will get the published messages. The sequences do not change afterwards, but the
        subjects may.
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
