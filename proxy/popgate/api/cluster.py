"""Serves ``GET /v1/admin/cluster``: the members of the cluster, their protocol versions, and the owners and moves of
queues."""

from fastapi import APIRouter
from pydantic import BaseModel

from popgate.api.admin_models import ProtocolRange
from popgate.api.openapi_errors import problem_responses
from popgate.engine.engine import Engine


class MemberAnswer(BaseModel):
    """A member of the cluster. ``queues`` is the number of queues that the member owns.

    The proxy that answers this request counts, since its start, what it has sent to the member: ``asked`` counts its
    own messages, and ``passed_on`` counts requests of clients.
    """

    instance: str
    address: str
    protocol: ProtocolRange
    owns_queues: bool
    queues: int
    asked: int
    passed_on: int


class OwnedQueueAnswer(BaseModel):
    """A queue of a group. ``owner`` is the proxy that consumes the queue, or null. ``moves_to`` is the next owner, or
    null if the queue does not move."""

    topic: str
    group: str
    queue: int
    broker_queue: str
    owner: str | None
    moves_to: str | None


class ClusterAnswer(BaseModel):
    """The cluster as the answering proxy sees it. A proxy that runs alone is the only member, and owns all queues.

    ``protocol`` is the protocol version that the members currently use among each other: the highest version that all
    of them support. ``protocol`` is null for a proxy that runs alone.
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
