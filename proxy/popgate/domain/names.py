"""Defines the names of topics, groups, queues and copies, in popgate and on the broker.

Owns the shape of every name, but not the list of existing objects.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType
from zlib import crc32

from popgate.domain.errors import InvalidRequest

TopicName = NewType("TopicName", str)
GroupName = NewType("GroupName", str)
CopyId = NewType("CopyId", str)
"""The unique id that popgate gives to each published copy (decision 3)."""
LeaseId = NewType("LeaseId", str)
StreamName = NewType("StreamName", str)
"""The name of a client's sequence of lease groups, such as one streaming query; epochs number its groups."""
ClientId = NewType("ClientId", str)
"""The name that a pull client, one running program, gives itself; unique within its group."""
InstanceId = NewType("InstanceId", str)
"""The id of one start of a proxy's process; never reused."""
BrokerQueue = NewType("BrokerQueue", str)
"""The name of a queue on the broker, adopted queues included."""

NAME_LENGTH_MAX = 64
NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
QUEUES_MAX = 256
DEFAULT_GROUP = GroupName("default")
TRANSIENT_PREFIX = "~"
"""Prefix of the copy ids of transient messages, which have no stable identity. These ids end with the channel."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BOUND_QUEUE = re.compile(r"popgate:([A-Za-z0-9._-]{1,64}):(\d{1,3})")


class Subscription(NamedTuple):
    """One (topic, group): the unit of consume mode, policy and statistics."""

    topic: TopicName
    group: GroupName


class QueueId(NamedTuple):
    """One queue of a subscription; ``number`` is its index, 0..N-1."""

    topic: TopicName
    group: GroupName
    number: int

    @property
    def subscription(self) -> Subscription:
        return Subscription(self.topic, self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The broker's queues of one subscription.

    ``queues[i]`` is the queue of index i. popgate did not declare ``adopted`` queues: it leaves their type, arguments
    and publishers unchanged and never deletes them. ``dead`` is always popgate's own queue.
    """

    subscription: Subscription
    queues: Sequence[BrokerQueue]
    dead: BrokerQueue
    adopted: bool = False
    unique_message_ids: bool = False
    """The admin declares that ``message_id`` is unique in the adopted queues, so it serves as the copy id."""

    def queue_ids(self) -> list[QueueId]:
        return [QueueId(*self.subscription, index) for index in range(len(self.queues))]


def transient_copy_id(instance: str, epoch: int, number: int) -> CopyId:
    """Return a copy id for a message without a stable identity."""
    return CopyId(f"{TRANSIENT_PREFIX}{instance}.{epoch}.{number}")


def is_transient(copy_id: CopyId) -> bool:
    """Return whether the copy id, and every lease under it, ends with its channel."""
    return copy_id.startswith(TRANSIENT_PREFIX)


def topic_name(value: str, *, field: str = "topic") -> TopicName:
    """Return ``value`` as a topic name. Raises: InvalidRequest, naming ``field``."""
    return TopicName(_checked(value, field))


def group_name(value: str, *, field: str = "group") -> GroupName:
    """Return ``value`` as a group name. Raises: InvalidRequest, naming ``field``."""
    return GroupName(_checked(value, field))


def stream_name(value: str, *, field: str = "stream") -> StreamName:
    """Return ``value`` as the name of a stream of lease groups. Raises: InvalidRequest, naming ``field``."""
    return StreamName(_checked(value, field))


def client_name(value: str, *, field: str = "client_id") -> ClientId:
    """Return ``value`` as the name of a pull client. Raises: InvalidRequest, naming ``field``."""
    return ClientId(_checked(value, field))


def exchange_name(topic: TopicName) -> str:
    return f"popgate:{topic}"


def own_layout(subscription: Subscription, queue_count: int) -> Layout:
    """Return the queues that popgate itself declares for a subscription (decision 13)."""
    topic, group = subscription
    names = [BrokerQueue(f"popgate:{topic}:{group}:{index}") for index in range(queue_count)]
    return Layout(subscription=subscription, queues=names, dead=dead_letter_queue(subscription))


def dead_letter_queue(subscription: Subscription) -> BrokerQueue:
    return BrokerQueue(f"popgate:{subscription.topic}:{subscription.group}:dead")


def bound_queue(topic: TopicName, index: int) -> BrokerQueue:
    """Return the name that stands for queue ``index`` of every group of ``topic``, as the target of a move.

    No queue has such a name: popgate's own queue names contain a group, and popgate adopts no queue whose name begins
    with popgate.
    """
    return BrokerQueue(f"popgate:{topic}:{index}")


def topic_of_queue(target: BrokerQueue) -> tuple[TopicName, int] | None:
    """Return the topic and the index of a ``target`` made by ``bound_queue``; None if ``target`` names one queue."""
    match = _BOUND_QUEUE.fullmatch(target)
    return None if match is None else (TopicName(match[1]), int(match[2]))


def queue_index(ordering_key: str, queue_count: int) -> int:
    """Return the queue index of an ordering key. It must never change, and is the same in every process."""
    return crc32(ordering_key.encode()) % queue_count


def _checked(value: str, field: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise InvalidRequest(
            f"{field} must be 1 to {NAME_LENGTH_MAX} characters of A-Z a-z 0-9 . _ -, not {value[:80]!r}", field=field
        )
    return value
