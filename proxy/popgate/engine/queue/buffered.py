"""Defines a buffered message of a queue, and the states that the message passes through.

    READY ----take----> GRANTING --the store grants it--> LEASED ---> settled: DROPPED
      ^                    |                               |  |
      |<-- not granted ----+                               |  +----> MOVING (to the dead letters) ---> DROPPED
      |                                                    |
      |<-- lease expired or released ----------------------+
      |                                                    |
      +<-- delay over -- DELAYED <-- released or expired, with a delay

    READY --its time to live is over--> DISCARDING --the store agrees--> DROPPED
    READY --requeued alone--> REQUEUED --delivered again--> READY

``TRANSITIONS`` contains all transitions. The record of a message may arrive from the store at any time, and the message
then enters the state of its record. Only a ready message can be granted or discarded. A dropped message stays dropped:
if its copy is delivered again, a new object is created.

A proxy may buffer 100,000 messages, so each object must use little memory. States change synchronously, between awaits.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, cast

from popgate.domain.lease import LeaseRecord
from popgate.domain.message import Message
from popgate.domain.names import CopyId, LeaseId, is_transient
from popgate.runtime.deadlines import NEVER

NO_LEASE = LeaseId("")
OVERHEAD_BYTES = 1_024
"""Approximate memory in bytes that a buffered message needs in addition to its body and headers."""
BYTES_AT_ONCE = 1024 * 1024
"""Number of bytes of messages that are read, sent or encoded in one step. A larger message is a step of its own."""
HEADER_BYTES, VALUE_BYTES = 100, 64
"""Approximate memory in bytes of a header in addition to its name and value, and of a value that is not text."""


class MessageState(IntEnum):
    READY = 0
    GRANTING = 1
    """A request to the store to lease the message is in progress."""
    LEASED = 2
    DELAYED = 3
    """The message becomes visible at its deadline."""
    MOVING = 4
    """The message is being moved to the dead-letter queue."""
    REQUEUED = 5
    """Only this message was requeued at the broker. Its place in the order does not change."""
    DISCARDING = 6
    """The time to live is over, and a request to the store to settle the message is in progress."""
    DROPPED = 7


_READY, _GRANTING, _LEASED, _DELAYED, _MOVING, _REQUEUED, _DISCARDING, _DROPPED = MessageState
_RECORDED = frozenset({_LEASED, _DELAYED, _MOVING, _DROPPED})
"""The states that a message can enter because of its record, from every state except DROPPED."""
TRANSITIONS = {
    _READY: _RECORDED | {_GRANTING, _DISCARDING, _REQUEUED},
    _GRANTING: _RECORDED | {_READY, _REQUEUED},
    _LEASED: _RECORDED | {_READY, _REQUEUED},
    _DELAYED: _RECORDED | {_READY, _REQUEUED},
    _MOVING: _RECORDED | {_READY, _REQUEUED},
    _REQUEUED: _RECORDED | {_READY},
    _DISCARDING: _RECORDED | {_READY, _REQUEUED},
    _DROPPED: frozenset[MessageState](),
}
"""The states that can follow each state. A message may always stay in its state."""
_COUNT = len(MessageState)
_FORBIDDEN = -1
_NEXT = [
    [first + new if old is new or new in TRANSITIONS[old] else _FORBIDDEN for new in MessageState]
    for first in (0, _COUNT)
    for old in MessageState
]
"""For each index of ``Counts.by_state`` and each state: the index after a change to this state."""

UNSEEN = (_READY, _REQUEUED)
"""The states of a message that is not leased, delayed or being processed."""
RECOVERABLE = (_LEASED, _DELAYED)
"""The states in which popgate may drop the body from memory, because a requeue makes the broker deliver it again."""


def size_of(message: Message) -> int:
    """Return the bytes of the body and of the headers, approximately for values that are not text."""
    size = len(message.body)
    for name, value in message.headers.items():
        size += len(name) + (len(value) if isinstance(value, str | bytes) else _size_of_value(value))
    return size


def _size_of_value(value: Any) -> int:
    """Return the approximate size of a header's value, in memory or in an answer, whichever is larger."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return sum((HEADER_BYTES + len(name) + _size_of_value(one) for name, one in fields.items()), VALUE_BYTES)
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return sum(map(_size_of_value, items), VALUE_BYTES)
    return len(value) + VALUE_BYTES if isinstance(value, str | bytes) else VALUE_BYTES


def count_at_once(messages: Iterable[Message | None]) -> int:
    """Return how many of ``messages``, from the first on, fit into ``BYTES_AT_ONCE``. The last one may exceed it."""
    before, count = 0, 0
    for message in messages:
        if before >= BYTES_AT_ONCE:
            break
        count += 1
        before += 0 if message is None else size_of(message)
    return count


def cost_of(message: Message) -> int:
    """Return the approximate memory of a buffered message, in bytes."""
    return OVERHEAD_BYTES + HEADER_BYTES * len(message.headers) + size_of(message)


class Counts:
    """Counts the messages of a queue in each state.

    The counts are updated with each change of state, because counting on demand would visit every message.
    """

    def __init__(self) -> None:
        self.by_state = [0] * 2 * _COUNT
        """Two counts for each state: at index ``state`` the messages behind others of their ordering key, and at index
        ``_COUNT + state`` the heads."""

    def all(self, state: MessageState) -> int:
        return self.by_state[state] + self.by_state[_COUNT + state]

    def heads(self, state: MessageState) -> int:
        """Count the messages that are the first of their ordering key, or have no ordering key."""
        return self.by_state[_COUNT + state]

    @property
    def undecided(self) -> int:
        """Number of messages with a request to the store in progress."""
        return self.all(_GRANTING) + self.all(_DISCARDING)

    @property
    def in_flight(self) -> int:
        """Number of messages that are leased, or are being leased."""
        return self.all(_LEASED) + self.all(_GRANTING)


class BufferedMessage:
    """A message of one queue. Times are monotonic, except those that end in ``_at`` (Unix seconds of the store).

    ``tag``: the tag of the message's delivery on the present channel, or None if there is no such delivery.
    ``message``: the content, or None if it has not been delivered yet or was dropped to save memory (a requeue fetches
    it again). ``deadline``: the end of the lease or of the delay. ``timer``: the time of the next check of the
    deadline, which may be earlier than the deadline. ``rank``: the position among the ready messages, or 0 if the
    message has not been delivered on this channel yet.

    ``ordering_keys`` maintains ``key``, ``next`` and ``is_head``. A message without an ordering key is always a head.
    ``is_offered``: whether the heap of ready messages has an entry for this message, possibly with an earlier rank.
    ``is_kept``: whether the body must stay in memory while the message is leased. ``client`` and
    ``invisibility_seconds`` describe the present or last lease for the journal. Only the proxy that granted the lease
    knows these two values.
    """

    is_counted: bool
    """Belongs to ``waiting_messages``, and is not set before, so that it costs a short-lived message nothing."""

    __slots__ = (
        "_counts",
        "_place",
        "client",
        "copy_id",
        "cost",
        "deadline",
        "delivery_count",
        "earlier_deliveries",
        "epoch",
        "first_delivered_at",
        "invisibility_seconds",
        "is_counted",
        "is_kept",
        "is_offered",
        "key",
        "lease_id",
        "leased_at",
        "message",
        "next",
        "queue_index",
        "rank",
        "state",
        "tag",
        "timer",
    )

    def __init__(self, counts: Counts, queue_index: int, copy_id: CopyId) -> None:
        self._counts = counts.by_state
        self.queue_index = queue_index
        self.copy_id = copy_id
        self.message: Message | None = None
        self.cost = 0
        """The ``cost_of`` the content, or 0 if it is not in memory."""
        self.tag: int | None = None
        self.state: MessageState = _READY
        """Only ``enter`` writes it."""
        self._place: int = _COUNT + _READY
        """The index of the message in ``Counts.by_state``. It tells the state, and whether the message is a head."""
        self.rank = 0
        self.key: str | None = None
        self.next: BufferedMessage | None = None
        self.is_offered = False
        self.is_kept = False
        self.lease_id = NO_LEASE
        self.epoch = 0
        self.deadline = NEVER
        self.timer = NEVER
        self.delivery_count = 0
        self.earlier_deliveries = 0
        self.first_delivered_at = 0.0
        self.leased_at = 0.0
        self.client: str | None = None
        self.invisibility_seconds = 0.0
        self._counts[self._place] += 1

    def enter(self, state: MessageState) -> None:
        """Change the state. A transition that is not in ``TRANSITIONS`` is a bug."""
        place, counts = self._place, self._counts
        new = _NEXT[place][state]
        assert new >= 0, f"a message can't go from {self.state.name} to {state.name}"
        counts[place] -= 1
        counts[new] += 1
        self._place, self.state = new, state

    def adopt(self, record: LeaseRecord) -> None:
        """Copy the lease data from the message's record."""
        self.lease_id = record.lease_id
        self.epoch = record.epoch
        self.delivery_count = record.delivery_count
        self.first_delivered_at = record.first_delivered_at
        self.leased_at = record.leased_at

    @property
    def is_head(self) -> bool:
        return self._place >= _COUNT

    @is_head.setter
    def is_head(self, is_head: bool) -> None:
        place = _COUNT * is_head + self.state
        self._counts[self._place] -= 1
        self._counts[place] += 1
        self._place = place

    @property
    def is_undecided(self) -> bool:
        """Whether a request to the store about the message is in progress. The answer decides its next state."""
        return self.state is _GRANTING or self.state is _DISCARDING

    @property
    def is_transient(self) -> bool:
        """Whether the message has no stable id. Its copy id and its lease end with the channel."""
        return is_transient(self.copy_id)

    @property
    def awaits_order(self) -> bool:
        """Whether the message has an ordering key, but no place among the messages of that key yet."""
        return self.key is None and not self.is_head

    def next_of_key(self) -> BufferedMessage | None:
        """Return the next message of the same ordering key that is not dropped, or None."""
        following = self.next
        while following is not None and following.state is _DROPPED:
            following = following.next
        if following is not None:  # otherwise keep the link: a new message is appended to the last, even if dropped
            self.next = following
        return following

    def __lt__(self, other: BufferedMessage) -> bool:
        """Return False, because heap entries of equal rank may be in any order.

        Two entries of equal rank are the same message before and after a requeue.
        """
        return False
