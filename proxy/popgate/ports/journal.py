"""The journal port: delivery events leave through it from the first day (design: section 9).

The engine reports a batch of one kind at a time, synchronously; an adapter must copy what it needs, must not raise and
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
    """Its dedup_id was published before: nothing was stored. The subject is the copy that was."""
    DELIVERED = "delivered"
    ACKED = "acked"
    RELEASED = "released"
    EXTENDED = "extended"
    EXPIRED = "expired"
    REJECTED = "rejected"
    DEAD_LETTERED = "dead_lettered"
    REDRIVEN = "redriven"
    """A dead letter went back to work: to its own queue or to another topic."""
    PURGED = "purged"
    """Dropped by an admin: a dead letter, or a message of a subscription."""
    DISCARDED = "discarded"
    """Its time to live ended before anybody took it."""
    FOUND_SETTLED = "found_settled"
    """The store had it as settled already: an ack was repeated, or the copy came again. The event of the settlement
    itself may be missing, where the store's answer was lost. The detail is the record's state."""
    REDELIVERED = "redelivered"
    """Given back by the broker after a channel ended, and attached to the lease that still holds."""
    GROUP_CREATED = "group_created"
    GROUP_DELETED = "group_deleted"
    """With all messages that it had."""
    TOPIC_DELETED = "topic_deleted"
    MODE_CHANGED = "mode_changed"
    QUEUE_CLAIMED = "queue_claimed"
    QUEUE_RELEASED = "queue_released"
    JOURNAL_STARTED = "journal_started"
    JOURNAL_LOST = "journal_lost"
    """So many events are missing before this one."""


OF_TOPICS = frozenset({EventKind.PUBLISHED, EventKind.DUPLICATE})
"""What publishers did, before any group: noted under the default group's name."""
OF_NO_MESSAGE = frozenset(
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
"""These are noted, not recorded, and not counted for /metrics."""


class Subject(Protocol):
    """What an event is about. ``delivery_count`` is 0 and ``leased_at`` (Unix seconds) 0.0 before any hand-out.

    ``client``: who has or had it, None where that is not known here. ``invisibility_seconds``: how long its lease was
    given for, 0.0 where there is none or that is not known here.
    """

    @property
    def copy_id(self) -> CopyId: ...
    @property
    def message(self) -> Message | None:
        """None where the body is not in this process any more."""
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
        subjects: Sequence[Subject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        """Note that ``kind`` happened to each of ``subjects`` at ``at`` (Unix seconds).

        ``details`` and ``new_copy_ids``, where given, have one for each: why, and the copy that goes on. ``groups``:
        those that will get what was published. None of the sequences changes afterwards, but the subjects may.
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
        """Note that ``kind`` happened to a topic, a group or a queue, at ``at`` (Unix seconds)."""
        ...
