"""Counts delivery events per subscription: the first reader of the journal, for /metrics.

Owns the counts since the process started, of what there still is. Keeps no events.
"""

from collections.abc import Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import OF_TOPICS, EventKind, Journal, Subject


class EventCounters:
    """A journal that only counts, and only what happens to messages."""

    def __init__(self) -> None:
        self.counts: dict[tuple[EventKind, Subscription], int] = {}

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
        if subjects:
            key = (kind, subscription)
            self.counts[key] = self.counts.get(key, 0) + len(subjects)

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
        pass

    def forget(self, subscription: Subscription) -> None:
        """The group is deleted: its counts go, or every group that ever was would stay in /metrics.

        What publishers did stays, whatever group it is noted under: it is the topic's.
        """
        for kind, of in list(self.counts):
            if of == subscription and kind not in OF_TOPICS:
                del self.counts[kind, of]

    def forget_topic(self, topic: TopicName) -> None:
        """The topic is deleted, and everything with it."""
        for kind, of in list(self.counts):
            if of.topic == topic:
                del self.counts[kind, of]


_conforms: type[Journal] = EventCounters
