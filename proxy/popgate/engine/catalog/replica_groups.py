"""Which groups say for themselves how many replicas their queues are to have: what a replica keeper asks for."""

from collections.abc import Sequence

from popgate.domain.replica_wanted import GroupReplicas
from popgate.engine.catalog.topics import Topics
from popgate.ports.replicas import ReplicaGroups


class ServedReplicaGroups:
    """As this proxy knows them, who follows the catalog: no question fails."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def asking(self) -> Sequence[GroupReplicas]:
        return [
            GroupReplicas(name, replicas, [*served.layout.queues, served.layout.dead])
            for name, served in self._topics.served.items()
            if (replicas := served.spec.policy.min_replicas) is not None
        ]


_conforms: type[ReplicaGroups] = ServedReplicaGroups
