"""What messages were when something happened to them: rows of ``WIDTH`` values, in lists that calls share.

A subject changes afterwards, and its body must not be kept for the journal's sake: so its fields are copied, and this
is what an event costs the event loop. Most messages are acked as they were handed out, many at once and in the same
order: such an ack has the rows of its hand-out, as long as they are at hand, and nothing is copied or made into Arrow a
second time. A hand-out is told by its copy id and ``leased_at``, and the rest of a row does not change while it lasts.
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
REMEMBERED_ROWS = 8_192
"""So many at least, and twice as many at most, of the latest hand-outs are at hand for their acks: below 7 MB."""

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
        self._recent_count = 0

    def of(self, kind: EventKind, subscription: Subscription, subjects: Sequence[Subject]) -> Rows:
        """The rows of ``subjects``, one at least."""
        if kind is EventKind.ACKED:
            return self._of_hand_out(subscription, subjects) or self._copied(subjects)
        rows = self._copied(subjects)
        if kind is EventKind.DELIVERED:
            self._remember(subscription, subjects, *rows)
        return rows

    def _copied(self, subjects: Sequence[Subject]) -> Rows:
        values = self._values
        if len(values) >= SHARED_VALUES:
            values = self._values = []
        first_value = len(values)
        extend = values.extend
        for one in subjects:  # plain, and as little of it as can be: this is the journal's cost an event
            message = one.message
            if message is None:
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
        return values, first_value

    def _remember(
        self, subscription: Subscription, subjects: Sequence[Subject], values: list[Any], first_value: int
    ) -> None:
        if self._recent_count >= REMEMBERED_ROWS:
            self._former, self._recent, self._recent_count = self._recent, {}, 0
        count = len(subjects)
        self._recent[subscription, subjects[0].copy_id] = values, first_value, count
        self._recent_count += count

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
