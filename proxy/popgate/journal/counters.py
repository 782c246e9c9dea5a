"""Counts the events of messages by kind and subscription, for /metrics.

The counts start at 0 when the process starts. The first groups, up to a maximum number, have their own counts. All
other groups are counted together as ``OTHER``. The counts of deleted topics and groups are dropped. The events
themselves are not stored. ``timings`` measures the times between them.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.domain.quotas import DEFAULTS
from popgate.journal.timings import TIMED, GroupTimings
from popgate.ports.journal import TOPIC_EVENTS, EventKind, Journal, JournalSubject

OTHER = Subscription(TopicName("(other)"), GroupName("(other)"))
"""The name under which groups without their own counts are counted. No topic or group can have this name."""


class EventCounters:
    """A journal that counts the events of messages, and measures the times between them.

    At most ``named_max`` groups have their own counts. ``queue_moves``: how often this proxy has claimed or released a
    queue.
    """

    def __init__(self, named_max: int = DEFAULTS.metrics_groups_max) -> None:
        self.counts: defaultdict[tuple[EventKind, Subscription], int] = defaultdict(int)
        self.timings: dict[Subscription, GroupTimings] = {}
        self.queue_moves = dict.fromkeys((EventKind.QUEUE_CLAIMED, EventKind.QUEUE_RELEASED), 0)
        self._named_max = named_max
        self._other_polls: Mapping[Subscription, int] = {}
        self._former_polls = 0
        self._named: dict[Subscription, None] = {}

    def named(self, subscription: Subscription) -> Subscription:
        """Return the name under which the events of ``subscription`` are counted.

        The result is ``subscription`` itself or ``OTHER``. Once a subscription has its own counts, it retains them
        until ``forget``, ``forget_topic`` or ``keep`` drops them.
        """
        if subscription not in self._named:
            if len(self._named) >= self._named_max:
                return OTHER
            self._named[subscription] = None
        return subscription

    def polls_of_others(self, polls: Mapping[Subscription, int]) -> int:
        """Return how many pops and pulls groups without their own counts have got. The result never falls.

        ``polls``: the numbers of the present ones. Those of groups that were deleted are remembered.
        """
        self._former_polls += sum(last for of, last in self._other_polls.items() if polls.get(of, 0) < last)
        self._other_polls = polls
        return self._former_polls + sum(polls.values())

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
            name = subscription if subscription in self._named else self.named(subscription)
            self.counts[kind, name] += len(subjects)
            if kind in TIMED:
                if name not in self.timings:
                    self.timings[name] = GroupTimings()
                self.timings[name].note(kind, subjects, at)

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
        if kind in self.queue_moves:
            self.queue_moves[kind] += 1

    def forget(self, subscription: Subscription) -> None:
        """Drop the counts of a deleted group, because /metrics would otherwise show them until the process ends.

        The counts of ``TOPIC_EVENTS``, such as publishes, are not dropped, because they count events of the topic, even
        if they are recorded under the name of this group.
        """
        for kind, of in list(self.counts):
            if of == subscription and kind not in TOPIC_EVENTS:
                del self.counts[kind, of]
        self.timings.pop(subscription, None)
        if all(of != subscription for _, of in self.counts):
            self._named.pop(subscription, None)

    def forget_topic(self, topic: TopicName) -> None:
        """Drop all counts of a deleted topic and its groups."""
        for kind, of in list(self.counts):
            if of.topic == topic:
                del self.counts[kind, of]
        for of in list(self._named):
            if of.topic == topic:
                del self._named[of]
                self.timings.pop(of, None)

    def keep(self, topics: Collection[TopicName], groups: Collection[Subscription]) -> None:
        """Drop the counts of all topics and groups except ``topics`` and ``groups``.

        The other topics and groups were deleted, perhaps through another proxy.
        """
        for of in list(self._named):
            if of.topic not in topics:
                self.forget_topic(of.topic)
            elif of not in groups:
                self.forget(of)


_conforms: type[Journal] = EventCounters
