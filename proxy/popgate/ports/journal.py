"""The journal port: delivery events leave through it from the first day (design: section 9).

The engine reports a batch of one kind at a time, synchronously; an adapter must copy what it needs, must not raise and
must not block.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from popgate.domain.message import Message
from popgate.domain.names import CopyId, Subscription


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
    REDELIVERED = "redelivered"
    """Given back by the broker after a channel ended, and attached to the lease that still holds."""


class Subject(Protocol):
    """What an event is about. ``delivery_count`` is 0 and ``leased_at`` (Unix seconds) 0.0 before any hand-out."""

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


class Journal(Protocol):
    def record(self, kind: EventKind, subscription: Subscription, subjects: Sequence[Subject], at: float) -> None:
        """Note that ``kind`` happened to each of ``subjects`` at ``at`` (Unix seconds)."""
        ...
