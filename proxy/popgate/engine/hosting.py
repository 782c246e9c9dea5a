"""The queue-host port: the cluster's word is carried out on the queues of all subscriptions."""

from collections.abc import Collection

from popgate.domain.names import BrokerQueue
from popgate.engine.queue_host import QueueHost
from popgate.engine.subscription import ServedSubscription
from popgate.engine.topics import Topics
from popgate.ports.queue_hosts import QueueHosts


class Hosting:
    """The queues of ``topics``."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def queues(self) -> Collection[BrokerQueue]:
        return [queue for served in self._topics.served.values() for queue in served.layout.queues]

    async def take(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            await served.take(host)

    async def hand_over(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            await served.hand_over(host)

    def lose(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            served.lose(host)

    def _find(self, queue: BrokerQueue) -> tuple[ServedSubscription, QueueHost] | None:
        for served in self._topics.served.values():
            if queue in served.layout.queues:
                return served, served.hosts[served.layout.queues.index(queue)]
        return None


_conforms: type[QueueHosts] = Hosting
