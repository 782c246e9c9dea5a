"""Takes snapshots of messages at their events. A snapshot is a row of ``WIDTH`` values in a list.

The subject of an event (a message with its lease) changes after the event, and the journal must not keep the body of
the message in memory. So the fields of the subject are copied. This copying is the only cost of an event on the event
loop. Most messages are acked in the same batches and in the same order in which they were delivered. Such an ack reuses
the rows of the delivery if these rows are still in memory, so that no row is copied or converted to Arrow twice. A
delivery is identified by copy id and ``leased_at``. The other values of its row are also correct for its ack, with one
exception: if a message was not in memory at the delivery, it may be in memory at the ack. So the rows of such a
delivery are not reused.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from popgate.domain.names import CopyId, Subscription
from popgate.ports.journal import EventKind, JournalSubject

WIDTH = 11
"""Number of values in a row: copy id, queue, delivery count, leased_at, client, invisibility seconds, message id,
ordering key, published_at, visible_at, and size of the body. ``columns.RowColumns`` has the same order."""
COPY_ID, QUEUE_INDEX, LEASED_AT = 0, 1, 3
SHARED_VALUES = 16_384
"""Number of values after which a new list is started. A separate list for each call would take more time, and a longer
list would not fit into the caches of the CPU."""
REMEMBERED_VALUES = 6 * SHARED_VALUES
"""Number of latest values whose deliveries stay in memory, so that acks can reuse the rows. At most twice this number
of values stays in memory, which takes at most 10 MB. The values of all events count, because a remembered delivery
keeps the whole list that contains its rows in memory."""

Rows: TypeAlias = tuple[list[Any], int]
"""A list of values, and the index in this list at which the first row starts."""


class SharedRows:
    """Copies the fields of subjects into rows, and remembers the rows of recent deliveries for their acks."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._recent: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """The rows and the row count of each recent delivery, by its subscription and the copy id of its first message.
        The key contains the subscription because copies in different groups have the same copy ids."""
        self._former: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """The deliveries before those in ``_recent``. All of them are dropped together."""
        self._recent_values = 0
        """Number of values copied since the last drop. It does not include the list that is being filled."""

    def of(self, kind: EventKind, subscription: Subscription, subjects: Sequence[JournalSubject]) -> Rows:
        """Return the rows of ``subjects``. ``subjects`` must not be empty."""
        if kind is EventKind.ACKED and (found := self._of_hand_out(subscription, subjects)):
            return found
        values, first_value, is_whole = self._copied(subjects)
        if kind is EventKind.DELIVERED and is_whole:
            self._recent[subscription, subjects[0].copy_id] = values, first_value, len(subjects)
        return values, first_value

    def _copied(self, subjects: Sequence[JournalSubject]) -> tuple[list[Any], int, bool]:
        """Copy the fields of ``subjects`` into consecutive rows.

        Return the list, the index of the first value, and whether all messages were in memory.
        """
        is_whole, values = True, self._values
        if len(values) >= SHARED_VALUES:
            self._recent_values += len(values)
            if self._recent_values >= REMEMBERED_VALUES:
                self._former, self._recent, self._recent_values = self._recent, {}, 0
            values = self._values = []
        first_value = len(values)
        extend = values.extend
        for one in subjects:  # this loop must be fast: it is the journal's cost on the event loop
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
        """Return the rows of the delivery that contained exactly ``subjects``, in the same order.

        Return None if no such delivery is remembered. The delivery is then forgotten.
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
            return None  # some messages were delivered again after the remembered delivery
        return values, first_value
