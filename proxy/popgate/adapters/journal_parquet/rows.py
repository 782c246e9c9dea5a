"""Snapshots of messages at their events: rows of ``WIDTH`` values, in lists that calls share.

A subject changes afterwards, and its body must not be kept for the journal. So its fields are copied, which is the cost
of an event for the event loop. Most messages are acked as they were handed out, many at once and in the same order.
Such an ack reuses the rows of its hand-out if they are still in memory, so that nothing is copied or converted to Arrow
twice. Copy id and ``leased_at`` identify a hand-out, and the rest of its row fits its ack. The exception is a hand-out
whose message was not in memory: the ack may know it.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from popgate.domain.names import CopyId, Subscription
from popgate.ports.journal import EventKind, JournalSubject

WIDTH = 11
"""Number of values in a row: copy id, queue, delivery count, leased_at, client, invisibility; message id, ordering key,
published_at, visible_at, size of the body, as in ``columns.RowColumns``."""
COPY_ID, QUEUE_INDEX, LEASED_AT = 0, 1, 3
SHARED_VALUES = 16_384
"""Length of a list of values. A list for each call would cost more, and a long list would not fit into CPU caches."""
REMEMBERED_VALUES = 6 * SHARED_VALUES
"""Hand-outs among at least this many of the latest values, and at most twice as many, stay in memory for their acks.
All values count, because a hand-out keeps its whole list: 10 MB at most."""

Rows: TypeAlias = tuple[list[Any], int]
"""The list, and the index of the first row in it."""


class SharedRows:
    """Copies the fields of subjects, and remembers hand-outs."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._recent: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """Rows and count of hand-outs, by their first message, and by group because all groups have the same copies."""
        self._former: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """The hand-outs before those, which are dropped all at once."""
        self._recent_values = 0
        """Number of values copied since then, except those in the list that grows."""

    def of(self, kind: EventKind, subscription: Subscription, subjects: Sequence[JournalSubject]) -> Rows:
        """Return the rows of ``subjects``, of which there is at least one."""
        if kind is EventKind.ACKED and (found := self._of_hand_out(subscription, subjects)):
            return found
        values, first_value, is_whole = self._copied(subjects)
        if kind is EventKind.DELIVERED and is_whole:
            self._recent[subscription, subjects[0].copy_id] = values, first_value, len(subjects)
        return values, first_value

    def _copied(self, subjects: Sequence[JournalSubject]) -> tuple[list[Any], int, bool]:
        """Return the rows, and whether all messages were in memory."""
        is_whole, values = True, self._values
        if len(values) >= SHARED_VALUES:
            self._recent_values += len(values)
            if self._recent_values >= REMEMBERED_VALUES:
                self._former, self._recent, self._recent_values = self._recent, {}, 0
            values = self._values = []
        first_value = len(values)
        extend = values.extend
        for one in subjects:  # as plain and short as possible: this is the journal's cost per event
            message = one.message
            if message is None:
                is_whole = False
                extend(
                    (
                        one.copy_id,
                        one.queue_index,
                        one.delivery_count,
                        one.leased_at,
                        one.client,
                        one.invisibility_seconds,
                        None,
                        None,
                        None,
                        None,
                        None,
                    )
                )
            else:
                extend(
                    (
                        one.copy_id,
                        one.queue_index,
                        one.delivery_count,
                        one.leased_at,
                        one.client,
                        one.invisibility_seconds,
                        message.message_id or None,
                        message.ordering_key,
                        message.published_at,
                        message.visible_at,
                        len(message.body),
                    )
                )
        return values, first_value, is_whole

    def _of_hand_out(self, subscription: Subscription, subjects: Sequence[JournalSubject]) -> Rows | None:
        """Return the rows from the hand-out of exactly these, in this order; None if there is none in memory."""
        first = subscription, subjects[0].copy_id
        found = self._recent.pop(first, None) or self._former.pop(first, None)
        if found is None:
            return None
        values, first_value, count = found
        end = first_value + WIDTH * count
        if [one.copy_id for one in subjects] != values[first_value + COPY_ID : end : WIDTH]:
            return None
        if [one.leased_at for one in subjects] != values[first_value + LEASED_AT : end : WIDTH]:
            return None  # some were handed out again since then
        return values, first_value
