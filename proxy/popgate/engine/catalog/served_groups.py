"""Keeps the groups that a proxy serves, also by topic: each publish needs the groups of one topic among thousands."""

from collections.abc import Mapping
from types import MappingProxyType

from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.runtime.garbage import DeletedQueues

_NO_GROUPS: Mapping[GroupName, ServedSubscription] = MappingProxyType({})


class ServedGroups(dict[Subscription, ServedSubscription]):
    """The served groups. Change them only by assigning and deleting single items: other methods don't keep ``of``."""

    def __init__(self) -> None:
        super().__init__()
        self._by_topic: dict[TopicName, dict[GroupName, ServedSubscription]] = {}
        self._deleted_queues = DeletedQueues()

    def of(self, topic: TopicName) -> Mapping[GroupName, ServedSubscription]:
        """Return the served groups of a topic."""
        return self._by_topic.get(topic, _NO_GROUPS)

    def __setitem__(self, name: Subscription, served: ServedSubscription) -> None:
        former = self.get(name)
        super().__setitem__(name, served)
        self._by_topic.setdefault(name.topic, {})[name.group] = served
        if former is not None:
            self._deleted_queues.add(len(former.hosts), self._count_messages)

    def __delitem__(self, name: Subscription) -> None:
        former = self[name]
        super().__delitem__(name)
        groups = self._by_topic[name.topic]
        del groups[name.group]
        if not groups:
            del self._by_topic[name.topic]
        self._deleted_queues.add(len(former.hosts), self._count_messages)

    def _count_messages(self) -> int:
        """Return the number of messages of all groups that this proxy has in memory. Visits each queue."""
        return sum(len(host.state.messages) for served in self.values() for host in served.hosts)
