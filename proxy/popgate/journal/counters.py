"""Counts delivery events per subscription: the first reader of the journal, for /metrics.

Owns the counts since the process started, of what there still is, and which groups are counted under their own names:
as many as are allowed, the first ones. All others are counted together, as ``OTHER``. Keeps no events.
"""

from collections.abc import Collection, Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.domain.quotas import DEFAULTS
from popgate.ports.journal import OF_TOPICS, EventKind, Journal, Subject

OTHER = Subscription(TopicName("(other)"), GroupName("(other)"))
"""No topic and no group has such a name."""


class EventCounters:
    """A journal that only counts, and only what happens to messages. At most ``named_max`` groups have own counts."""

    def __init__(self, named_max: int = DEFAULTS.metrics_groups_max) -> None:
        self.counts: dict[tuple[EventKind, Subscription], int] = {}
        self._named_max = named_max
        self._named: dict[Subscription, None] = {}

    def named(self, subscription: Subscription) -> Subscription:
        """The name under which ``subscription`` is counted. It stays the same as long as ``subscription`` is known."""
        if subscription not in self._named:
            if len(self._named) >= self._named_max:
                return OTHER
            self._named[subscription] = None
        return subscription

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
        """The group is deleted: its counts go, or every group that ever was would stay in /metrics.

        What publishers did stays, whatever group it is noted under: it is the topic's.
        """
        for kind, of in list(self.counts):
            if of == subscription and kind not in OF_TOPICS:
                del self.counts[kind, of]
        if all(of != subscription for _, of in self.counts):
            self._named.pop(subscription, None)

    def forget_topic(self, topic: TopicName) -> None:
        """The topic is deleted, and everything with it."""
        for kind, of in list(self.counts):
            if of.topic == topic:
                del self.counts[kind, of]
        for of in list(self._named):
            if of.topic == topic:
                del self._named[of]

    def keep(self, topics: Collection[TopicName], groups: Collection[Subscription]) -> None:
        """Forget all others: they were deleted, perhaps through another proxy."""
        for of in list(self._named):
            if of.topic not in topics:
                self.forget_topic(of.topic)
            elif of not in groups:
                self.forget(of)


_conforms: type[Journal] = EventCounters
