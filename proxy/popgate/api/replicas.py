"""Serves ``GET /v1/admin/replicas``: the replicas of each quorum queue and stream, and the settings of the groups.

The answer contains the present and wanted replicas, and the planned changes. This module makes no decisions: the
replica keeper does.
"""

from fastapi import APIRouter
from pydantic import BaseModel

from popgate.api.openapi_errors import problem_responses
from popgate.engine.catalog.replica_groups import ServedReplicaGroups
from popgate.engine.engine import Engine
from popgate.replicas.rows import change_row, node_rows, queue_rows
from popgate.replicas.view import CachedReplicaView


class ReplicaChangeAnswer(BaseModel):
    """A change of replicas. ``kind`` is "add", "forget" or "lead" (the node's replica becomes the leader)."""

    kind: str
    queue: str
    node: str
    reason: str


class ReplicaQueueAnswer(BaseModel):
    """A quorum queue or stream, and its replicas.

    ``asked`` is the number of replicas that ``source`` asks for. ``wanted`` is ``asked``, limited to the number of
    nodes. ``verdict`` is the keeper's decision about the queue, and ``reason`` explains it. ``change`` is the change
    that the keeper would make now.
    """

    queue: str
    vhost: str
    kind: str
    members: list[str]
    online: list[str]
    wanted: int
    asked: int
    source: str
    verdict: str
    reason: str
    change: ReplicaChangeAnswer | None


class ReplicaNodeAnswer(BaseModel):
    """A node of RabbitMQ. ``unfit_reason`` is the reason why the node gets no replica, or null if it may get one."""

    node: str
    running: bool
    zone: str | None
    unfit_reason: str | None
    memory_share: float
    disk_share: float
    replicas: int


class KeeperAtWorkAnswer(BaseModel):
    """The active keeper. ``since`` is in Unix seconds. ``fencing_token`` only grows."""

    holder: str
    fencing_token: int | None
    since: float | None


class ReplicaEventAnswer(BaseModel):
    """A decision or an action of this proxy's keeper. ``at`` is in Unix seconds."""

    at: float
    event: str
    what: str
    queue: str | None
    node: str
    reason: str


class ReplicasAnswer(BaseModel):
    """The replicas as this proxy's keeper sees them.

    ``keeps`` is true if this proxy has a keeper (--replica-keeper). Without a keeper, all lists are empty.
    ``is_at_work`` is true if this proxy's keeper is the active one. ``at_work`` is the active keeper, on any proxy.
    ``under_way`` and ``events`` list the changes and events of this proxy's keeper only.
    """

    keeps: bool
    is_at_work: bool
    at_work: KeeperAtWorkAnswer | None
    at: float | None
    queues: list[ReplicaQueueAnswer]
    nodes: list[ReplicaNodeAnswer]
    under_way: list[ReplicaChangeAnswer]
    events: list[ReplicaEventAnswer]


class GroupReplicasAnswer(BaseModel):
    """A group whose policy has a ``min_replicas``. ``queues`` lists the group's queues on the broker, including its
    dead-letter queue."""

    topic: str
    group: str
    min_replicas: int
    queues: list[str]


class ReplicaGroupsAnswer(BaseModel):
    """The groups with a ``min_replicas``. ``vhost`` is the virtual host of the groups' queues. It is null on the
    embedded store, whose queues have no replicas."""

    vhost: str | None
    groups: list[GroupReplicasAnswer]


def replicas_router(engine: Engine, cached_view: CachedReplicaView | None) -> APIRouter:
    router = APIRouter(prefix="/v1/admin", tags=["admin"], responses=problem_responses(503))
    groups = ServedReplicaGroups(engine.topics)

    @router.get("/replicas/groups")
    async def get_replica_groups() -> ReplicaGroupsAnswer:
        """List the groups that set the number of replicas of their queues, for replica keepers outside the proxies."""
        return ReplicaGroupsAnswer(
            vhost=engine.capabilities.vhost,
            groups=[
                GroupReplicasAnswer(
                    topic=one.group.topic, group=one.group.group, min_replicas=one.replicas, queues=list(one.queues)
                )
                for one in await groups.asking()
            ],
        )

    @router.get("/replicas")
    async def get_replicas() -> ReplicasAnswer:
        """Return the present and wanted replicas of RabbitMQ's queues, the planned changes, and the reasons."""
        if cached_view is None:
            return ReplicasAnswer(
                keeps=False, is_at_work=False, at_work=None, at=None, queues=[], nodes=[], under_way=[], events=[]
            )
        view, keeper = await cached_view.view(), cached_view.keeper
        holder = view.at_work
        return ReplicasAnswer(
            keeps=True,
            is_at_work=keeper.is_at_work,
            at_work=None
            if holder is None
            else KeeperAtWorkAnswer(holder=holder.holder, fencing_token=holder.fencing_token, since=holder.since),
            at=view.survey.at,
            queues=[ReplicaQueueAnswer.model_validate(row) for row in queue_rows(view.survey.plan)],
            nodes=[ReplicaNodeAnswer.model_validate(row) for row in node_rows(view.survey.seen)],
            under_way=[ReplicaChangeAnswer.model_validate(change_row(change)) for change in keeper.under_way],
            events=[
                ReplicaEventAnswer(
                    at=event.at,
                    event=event.event,
                    what=event.what,
                    queue=None if event.queue is None else event.queue.name,
                    node=event.node,
                    reason=event.reason,
                )
                for event in keeper.record.latest
            ],
        )

    return router
