"""Counts delivery events per subscription: the first reader of the journal, for /metrics.

Owns the counts since the process started. Keeps no events.
"""

from collections.abc import Sequence

from popgate.domain.names import Subscription
from popgate.ports.journal import EventKind, Journal, Subject


class EventCounters:
    """A journal that only counts."""

    def __init__(self) -> None:
        self.counts: dict[tuple[EventKind, Subscription], int] = {}

    def record(self, kind: EventKind, subscription: Subscription, subjects: Sequence[Subject], at: float) -> None:
        if subjects:
            key = (kind, subscription)
            self.counts[key] = self.counts.get(key, 0) + len(subjects)


_conforms: type[Journal] = EventCounters
