"""``GET /v1/admin/cluster``: shows members, versions, owners of queues, and moves. It decides nothing."""

from fastapi import APIRouter
from pydantic import BaseModel

from popgate.api.admin_models import ProtocolRange
from popgate.api.openapi import problem_responses
from popgate.engine.engine import Engine


class MemberAnswer(BaseModel):
    """A proxy. ``queues`` is the number of queues that it owns.

    ``asked`` and ``passed_on`` count the requests that the answering proxy has sent to it since the answering proxy's
    start: ``asked`` its own messages, ``passed_on`` clients' requests.
    """

    instance: str
    address: str
    protocol: ProtocolRange
    owns_queues: bool
    queues: int
    asked: int
    passed_on: int


class OwnedQueueAnswer(BaseModel):
    """A queue. ``owner`` is null while no proxy consumes the queue. ``moves_to`` is its next owner."""

    topic: str
    group: str
    queue: int
    broker_queue: str
    owner: str | None
    moves_to: str | None


class ClusterAnswer(BaseModel):
    """The cluster as the answering proxy sees it. A proxy that runs alone is the only member, and owns all queues.

    ``protocol`` is the version that the members currently use between each other, the highest one that all of them
    support. It is null for a proxy that runs alone.
    """

    instance: str
    protocol: int | None
    members: list[MemberAnswer]
    queues: list[OwnedQueueAnswer]
    moving: int


def cluster_router(engine: Engine) -> APIRouter:
    router = APIRouter(prefix="/v1/admin", tags=["admin"], responses=problem_responses(503))

    @router.get("/cluster")
    async def get_cluster() -> ClusterAnswer:
        """Return the proxies of the cluster, and which queues each of them owns."""
        status = engine.cluster_status()
        return ClusterAnswer(
            instance=status.me,
            protocol=status.version,
            members=[
                MemberAnswer(
                    instance=member.instance,
                    address=member.address,
                    protocol=ProtocolRange(min=member.protocols[0], max=member.protocols[1]),
                    owns_queues=member.owns_queues,
                    queues=member.queues,
                    asked=member.asked,
                    passed_on=member.forwarded,
                )
                for member in status.members
            ],
            queues=[
                OwnedQueueAnswer(
                    topic=one.queue.topic,
                    group=one.queue.group,
                    queue=one.queue.number,
                    broker_queue=one.broker_queue,
                    owner=one.owner,
                    moves_to=one.moves_to,
                )
                for one in status.queues
            ],
            moving=sum(one.moves_to is not None for one in status.queues),
        )

    return router
