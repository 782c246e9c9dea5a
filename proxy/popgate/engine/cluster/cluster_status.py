"""Reports this proxy's view of the cluster: the members, the owners of the queues, and the queues that will move."""

from collections.abc import Iterator
from typing import NamedTuple

from popgate.domain.names import BrokerQueue, InstanceId, QueueId
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext


class MemberStatus(NamedTuple):
    """A member of the cluster. The counts ``asked`` and ``forwarded`` begin at 0 when this proxy starts.

    ``queues``: the number of queues that the member owns. ``asked``: the number of peer requests that this proxy has
    sent to the member. ``forwarded``: the number of client requests that this proxy has forwarded to the member.
    """

    instance: InstanceId
    address: str
    protocols: tuple[int, int]
    owns_queues: bool
    queues: int
    asked: int
    forwarded: int


class QueueOwner(NamedTuple):
    """The owner of a queue, or None if no proxy owns the queue at the moment.

    ``moves_to``: the proxy that will own the queue next, or None if the owner does not change.
    """

    queue: QueueId
    broker_queue: BrokerQueue
    owner: InstanceId | None
    moves_to: InstanceId | None


class ClusterStatus(NamedTuple):
    """The cluster as this proxy sees it. ``members`` is empty if this proxy is not in a cluster and so owns all queues.

    ``version``: the version of the peer protocol that the members currently use, or None outside a cluster.
    """

    me: InstanceId
    version: int | None
    members: list[MemberStatus]
    queues: list[QueueOwner]


def cluster_status(context: EngineContext, topics: Topics) -> ClusterStatus:
    """Return this proxy's view of the cluster.

    After a change, views differ until all proxies have received the change.
    """
    me, router = InstanceId(context.instance), context.router
    if router.cluster is None:
        return ClusterStatus(me, None, [], [QueueOwner(queue, name, me, None) for queue, name in _queues(topics)])
    ownership = router.cluster.ownership
    view, moves = ownership.view, ownership.moves()
    members = [
        MemberStatus(
            member.instance,
            member.address,
            member.protocols,
            member.owns,
            sum(owner == member.instance for owner in view.owners.values()),
            router.asked[member.instance],
            router.forwarded[member.instance],
        )
        for member in view.members.values()
    ]
    queues = [QueueOwner(queue, name, view.owners.get(name), moves.get(name)) for queue, name in _queues(topics)]
    return ClusterStatus(me, router.cluster.version(), members, queues)


def _queues(topics: Topics) -> Iterator[tuple[QueueId, BrokerQueue]]:
    for _, served in sorted(topics.served.items()):
        yield from zip(served.layout.queue_ids(), served.layout.queues, strict=True)
