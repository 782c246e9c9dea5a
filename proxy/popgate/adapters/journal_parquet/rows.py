"""What messages were when something happened to them: rows of ``WIDTH`` values, in lists that calls share.

A subject changes afterwards, and its body must not be kept for the journal's sake: so its fields are copied, and this
is what an event costs the event loop. Most messages are acked as they were handed out, many at once and in the same
order: such an ack has the rows of its hand-out, as long as they are at hand, and nothing is copied or made into Arrow a
second time. A hand-out is told by its copy id and ``leased_at``, and the rest of its row is good for its ack: but where
the message itself was not here, which may be known by then.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from popgate.domain.names import CopyId, Subscription
from popgate.ports.journal import EventKind, Subject

WIDTH = 11
"""Copy id, queue, delivery count, leased_at, client, invisibility; message id, ordering key, published_at, visible_at,
size of the body: ``columns.RowColumns``."""
COPY_ID, QUEUE_INDEX, LEASED_AT = 0, 1, 3
SHARED_VALUES = 16_384
"""How long a list of values gets: one for each call would cost more, and a long one is in no cache."""
REMEMBERED_VALUES = 6 * SHARED_VALUES
"""The hand-outs among so many of the latest values at least, and twice as many at most, are at hand for their acks.
Counted are all values, for a hand-out keeps the whole list that it stands in: 10 MB at most."""

Rows: TypeAlias = tuple[list[Any], int]
"""The list, and where in it the first row begins."""


class SharedRows:
    """Copies the fields of subjects, and remembers hand-outs."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._recent: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """Hand-outs by their group, for all groups have the same copies, and their first message: their rows, and how
        many they are."""
        self._former: dict[tuple[Subscription, CopyId], tuple[list[Any], int, int]] = {}
        """Those before: they are dropped all at once."""
        self._recent_values = 0
        """How many were copied since then, but for the list that grows."""

    def of(self, kind: EventKind, subscription: Subscription, subjects: Sequence[Subject]) -> Rows:
        """The rows of ``subjects``, one at least."""
        if kind is EventKind.ACKED and (found := self._of_hand_out(subscription, subjects)):
            return found
        values, first_value, is_whole = self._copied(subjects)
        if kind is EventKind.DELIVERED and is_whole:
            self._recent[subscription, subjects[0].copy_id] = values, first_value, len(subjects)
        return values, first_value

    def _copied(self, subjects: Sequence[Subject]) -> tuple[list[Any], int, bool]:
        """The rows, and whether all messages were here."""
        is_whole, values = True, self._values
        if len(values) >= SHARED_VALUES:
            self._recent_values += len(values)
            if self._recent_values >= REMEMBERED_VALUES:
                self._former, self._recent, self._recent_values = self._recent, {}, 0
            values = self._values = []
        first_value = len(values)
        extend = values.extend
        for one in subjects:  # plain, and as little of it as can be: this is the journal's cost an event
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

    def _of_hand_out(self, subscription: Subscription, subjects: Sequence[Subject]) -> Rows | None:
        """The rows that were made when just these were handed out, in this order; None where that is not known."""
        first = subscription, subjects[0].copy_id
        found = self._recent.pop(first, None) or self._former.pop(first, None)
        if found is None:
            return None
        values, first_value, count = found
        end = first_value + WIDTH * count
        if [one.copy_id for one in subjects] != values[first_value + COPY_ID : end : WIDTH]:
            return None
        if [one.leased_at for one in subjects] != values[first_value + LEASED_AT : end : WIDTH]:
            return None  # some were handed out once more since
        return values, first_value
