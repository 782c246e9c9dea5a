"""Finds the queues of a group on RabbitMQ, and how RabbitMQ hands them from one consumer to another.

popgate's queues are found by their names; adopted queues have other names, and must be listed by the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from popgate_client.amqp.balance import Handover
from popgate_client.amqp.queue_kind import QueueKind, queue_kind
from popgate_client.amqp.session import NOT_FOUND, ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable, Conflict, GroupNotFound, TopicNotFound

QUEUES_MAX = 256
REMEDY = (
    "RabbitMQ can't give a queue a single active consumer later: declare a new queue with the argument "
    "x-single-active-consumer and move the messages there, or consume through a popgate proxy"
)


@dataclass(frozen=True, slots=True)
class Group:
    """A group. `queues[i]` is the queue of index i; `dead` is the queue for rejected messages."""

    topic: str
    name: str
    queues: Sequence[str]
    handover: Handover

    @property
    def dead(self) -> str:
        return f"popgate:{self.topic}:{self.name}:dead"


async def find_group(session: Session, topic: str, name: str, queues: Sequence[str] | None) -> Group:
    """Find the group's queues; `queues` names those of an adopted topic.

    Raises: TopicNotFound, GroupNotFound; Conflict for queues that can't be shared this way; BrokerUnavailable.
    """
    names = list(queues) if queues is not None else await _own_queues(session, topic, name)
    if not names:
        raise await _nothing_found(session, topic, name)
    kinds: list[QueueKind] = []
    for queue in names if queues is not None else names[:1]:  # popgate declares all queues of a group alike
        kind = await queue_kind(session, queue)
        if kind is None:
            raise GroupNotFound("group_not_found", f"there is no queue {queue!r} on RabbitMQ")
        if kind.type not in ("classic", "quorum") or not kind.is_single_active:
            what = "is a stream" if kind.type == "stream" else "has no single active consumer"
            raise Conflict("conflict", f"queue {queue!r} {what}, so programs can't share it. {REMEDY}")
        kinds.append(kind)
    return Group(topic, name, names, _handover({kind.type for kind in kinds}, session.server_version))


async def exists(session: Session, queue: str) -> bool:
    """Whether RabbitMQ has a queue of this name. Raises: BrokerUnavailable."""
    channel = await session.open_channel()
    try:
        await session.call(channel.queue_declare(queue, passive=True))
    except ChannelRefused as error:
        if error.code != NOT_FOUND or "no queue" not in error.text:  # the node of a classic queue may be down
            raise BrokerUnavailable("broker_unavailable", f"queue {queue!r} can't be inspected: {error}") from error
        return False
    finally:
        await session.close_channel(channel)
    return True


def _handover(types: set[str], server_version: tuple[int, ...]) -> Handover:
    if types == {"classic"}:
        return Handover.CLAIM
    if types == {"quorum"} and server_version >= (4,):
        return Handover.TAKE
    return Handover.SOLE  # correct if waiting consumers are served in their order


async def _own_queues(session: Session, topic: str, name: str) -> list[str]:
    found: list[str] = []
    while len(found) < QUEUES_MAX and await exists(session, queue := f"popgate:{topic}:{name}:{len(found)}"):
        found.append(queue)
    return found


async def _nothing_found(session: Session, topic: str, name: str) -> Exception:
    if await exists(session, f"popgate:{topic}:{name}:dead"):
        return Conflict(
            "conflict",
            f"topic {topic!r} has adopted queues, which can't be found by their names: pass queues=[...]. Each of them "
            f"needs a single active consumer. {REMEDY}",
        )
    channel = await session.open_channel()
    try:
        await session.call(channel.exchange_declare(f"popgate:{topic}", passive=True))
    except ChannelRefused:
        return TopicNotFound("topic_not_found", f"popgate has not created topic {topic!r} on this virtual host")
    finally:
        await session.close_channel(channel)
    return GroupNotFound("group_not_found", f"popgate has not created group {name!r} of topic {topic!r}")
