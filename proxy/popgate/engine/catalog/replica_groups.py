"""Lists for the replica keeper the groups whose policy sets the number of replicas."""

from collections.abc import Sequence

from popgate.domain.replica_wanted import GroupReplicas
from popgate.engine.catalog.topics import Topics
from popgate.ports.replicas import ReplicaGroups


class ServedReplicaGroups:
    """Lists groups from this proxy's copy of the catalog. So a call needs no I/O and never fails."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def asking(self) -> Sequence[GroupReplicas]:
        return [
            GroupReplicas(name, replicas, [*served.layout.queues, served.layout.dead])
            for name, served in self._topics.served.items()
            if (replicas := served.spec.policy.min_replicas) is not None
        ]


_conforms: type[ReplicaGroups] = ServedReplicaGroups
