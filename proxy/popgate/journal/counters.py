"""Counts delivery events per subscription, for /metrics.

Owns the counts of existing topics and groups since the start of the process. The first groups, up to a maximum, are
counted under their own names. All other groups are counted together as ``OTHER``. Stores no events.
"""

from collections.abc import Collection, Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.domain.quotas import DEFAULTS
from popgate.ports.journal import TOPIC_EVENTS, EventKind, Journal, JournalSubject

OTHER = Subscription(TopicName("(other)"), GroupName("(other)"))
"""The name of all other groups; no topic and no group can have it."""


class EventCounters:
    """A journal that only counts events of messages. At most ``named_max`` groups have their own counts."""

    def __init__(self, named_max: int = DEFAULTS.metrics_groups_max) -> None:
        self.counts: dict[tuple[EventKind, Subscription], int] = {}
        self._named_max = named_max
        self._named: dict[Subscription, None] = {}

    def named(self, subscription: Subscription) -> Subscription:
        """Return the name under which ``subscription`` is counted.

        The name stays the same as long as ``subscription`` is known.
        """
        if subscription not in self._named:
            if len(self._named) >= self._named_max:
                return OTHER
            self._named[subscription] = None
        return subscription

    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[JournalSubject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        if subjects:
            key = (kind, self.named(subscription))
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
        """Drop the counts of a deleted group; otherwise it would stay in /metrics for ever.

        The counts of publishes stay, even if they are recorded under this group's name: they belong to the topic.
        """
        for kind, of in list(self.counts):
            if of == subscription and kind not in TOPIC_EVENTS:
                del self.counts[kind, of]
        if all(of != subscription for _, of in self.counts):
            self._named.pop(subscription, None)

    def forget_topic(self, topic: TopicName) -> None:
        """Drop all counts of a deleted topic."""
        for kind, of in list(self.counts):
            if of.topic == topic:
                del self.counts[kind, of]
        for of in list(self._named):
            if of.topic == topic:
                del self._named[of]

    def keep(self, topics: Collection[TopicName], groups: Collection[Subscription]) -> None:
        """Drop the counts of all other topics and groups: they were deleted, perhaps through another proxy."""
        for of in list(self._named):
            if of.topic not in topics:
                self.forget_topic(of.topic)
            elif of not in groups:
                self.forget(of)


_conforms: type[Journal] = EventCounters
