"""Takes snapshots of messages at their events: rows of ``WIDTH`` values, in lists that calls share.

A subject changes after its event, and its body must not be kept for the journal. So its fields are copied, which is the
event loop's cost for an event. Most messages are acked as they were delivered, many at once and in the same order. Such
an ack reuses the rows of its delivery if they are still in memory, so that nothing is copied or converted to Arrow
twice. A delivery is identified by copy id and ``leased_at``, and the other values of its row are also valid for its
ack. There is one exception: if a message was not in memory when it was delivered, the delivery's rows are not reused,
because the message may be in memory at the ack.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from popgate.domain.names import CopyId, Subscription
from popgate.ports.journal import EventKind, JournalSubject

WIDTH = 11
"""Number of values in a row: copy id, queue, delivery count, leased_at, client, invisibility, message id, ordering key,
published_at, visible_at, and size of the body. The order is that of ``columns.RowColumns``."""
COPY_ID, QUEUE_INDEX, LEASED_AT = 0, 1, 3
SHARED_VALUES = 16_384
"""Length of a list of values. A separate list for each call would cost more, and a longer list would not fit into CPU
caches."""
REMEMBERED_VALUES = 6 * SHARED_VALUES
"""Number of latest values within which deliveries stay in memory for their acks. At most, twice as many values stay.
All values count, not only those of deliveries, because a delivery keeps its whole list. They take 10 MB at most."""

Rows: TypeAlias = tuple[list[Any], int]
"""A list of values, and the index of the first row's first value in it."""


class SharedRows:
    """Copies the fields of subjects, and remembers deliveries."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._recent: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """Rows and row count of each recent delivery, by its first message. The key contains the subscription, because
        all groups have copies with the same ids."""
        self._former: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """The deliveries before the recent ones. They are dropped all at once."""
        self._recent_values = 0
        """Number of values copied since the last drop, without those in the list that is being filled."""

    def of(self, kind: EventKind, subscription: Subscription, subjects: Sequence[JournalSubject]) -> Rows:
        """Return the rows of ``subjects``, which must not be empty."""
        if kind is EventKind.ACKED and (found := self._of_hand_out(subscription, subjects)):
            return found
        values, first_value, is_whole = self._copied(subjects)
        if kind is EventKind.DELIVERED and is_whole:
            self._recent[subscription, subjects[0].copy_id] = values, first_value, len(subjects)
        return values, first_value

    def _copied(self, subjects: Sequence[JournalSubject]) -> tuple[list[Any], int, bool]:
        """Return the list, the index of the first value, and whether all messages were in memory."""
        is_whole, values = True, self._values
        if len(values) >= SHARED_VALUES:
            self._recent_values += len(values)
            if self._recent_values >= REMEMBERED_VALUES:
                self._former, self._recent, self._recent_values = self._recent, {}, 0
            values = self._values = []
        first_value = len(values)
        extend = values.extend
        for one in subjects:  # as simple and short as possible, because this is the journal's cost for each event
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
        """Return the rows of the delivery of exactly these subjects, in this order.

        Return None if no such rows are in memory.
        """
        first = subscription, subjects[0].copy_id
        found = self._recent.pop(first, None) or self._former.pop(first, None)
        if found is None:
            return None
        values, first_value, count = found
        end = first_value + WIDTH * count
        if [one.copy_id for one in subjects] != values[first_value + COPY_ID : end : WIDTH]:
            return None
        if [one.leased_at for one in subjects] != values[first_value + LEASED_AT : end : WIDTH]:
            return None  # some were delivered again since the remembered delivery
        return values, first_value
