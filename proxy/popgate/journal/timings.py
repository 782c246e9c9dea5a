"""Measures the times of one group's messages from the events of the journal, for /metrics.

Theory of operation. The events of a batch arrive together, so their times are measured together: at most
``SAMPLES_MAX`` messages of a batch are measured, evenly spread over the batch. Each of them also counts for the
messages between it and the next one. So the histograms count every message, and a large batch costs no more than a
small one. Redeliveries are counted exactly.
"""

from collections.abc import Iterator, Sequence

from popgate.ports.journal import EventKind, JournalSubject
from popgate.runtime.histogram import WAIT_SECONDS, Histogram

SAMPLES_MAX = 8
"""Maximum number of messages of a batch whose times are measured."""
_DELIVERED, _ACKED = EventKind.DELIVERED, EventKind.ACKED
TIMED = frozenset({_DELIVERED, _ACKED, EventKind.RELEASED, EventKind.EXPIRED, EventKind.REJECTED})
"""The kinds of events that ``GroupTimings`` measures: leases that begin and that end."""


class GroupTimings:
    """The times of the messages of one group.

    ``publish_to_delivery``: from the time when a message became visible until its first delivery.
    ``delivery_to_ack``: from the last delivery until the ack. ``other_leases``: how long leases lasted that ended in
    another way. ``redelivered_count``: the number of deliveries of messages that had been delivered before.
    """

    __slots__ = ("delivery_to_ack", "other_leases", "publish_to_delivery", "redelivered_count")

    def __init__(self) -> None:
        self.publish_to_delivery = Histogram(WAIT_SECONDS)
        self.delivery_to_ack = Histogram(WAIT_SECONDS)
        self.other_leases = Histogram(WAIT_SECONDS)
        self.redelivered_count = 0

    def note(self, kind: EventKind, subjects: Sequence[JournalSubject], at: float) -> None:
        """Measure an event of one of the kinds in ``TIMED`` that happened to ``subjects`` at ``at``, in Unix seconds.

        Messages without a publish time, and leases whose beginning this proxy does not know, are not measured.
        """
        if len(subjects) > SAMPLES_MAX:
            self._note_samples(kind, subjects, at)
        elif kind is _DELIVERED:
            for one in subjects:
                if one.delivery_count > 1:
                    self.redelivered_count += 1
                elif (message := one.message) is not None:
                    since = message.visible_at or message.published_at
                    if since:
                        self.publish_to_delivery.add(at - since)
        else:
            histogram = self.delivery_to_ack if kind is _ACKED else self.other_leases
            for one in subjects:
                if one.leased_at:
                    histogram.add(at - one.leased_at)

    def _note_samples(self, kind: EventKind, subjects: Sequence[JournalSubject], at: float) -> None:
        if kind is _DELIVERED:
            first = [one for one in subjects if one.delivery_count < 2]
            self.redelivered_count += len(subjects) - len(first)
            for one, weight in _samples(first):
                message = one.message
                if message is not None and message.waiting_since:
                    self.publish_to_delivery.add(at - message.waiting_since, weight)
            return
        histogram = self.delivery_to_ack if kind is _ACKED else self.other_leases
        for one, weight in _samples(subjects):
            if one.leased_at:
                histogram.add(at - one.leased_at, weight)


def _samples(many: Sequence[JournalSubject]) -> Iterator[tuple[JournalSubject, int]]:
    """Yield at most ``SAMPLES_MAX`` of ``many``, each with the number of subjects for which it counts."""
    count = len(many)
    step = max(1, -(-count // SAMPLES_MAX))
    for place in range(0, count, step):
        yield many[place], min(step, count - place)
