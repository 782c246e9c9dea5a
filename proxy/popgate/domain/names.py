"""Defines the names of topics, groups, queues and copies, in popgate and on the broker.

This module defines the form of every name. It does not know which topics, groups and queues exist.
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
"""The id of one copy of a message. popgate mints a unique id for each copy that it publishes (decision 3)."""
LeaseId = NewType("LeaseId", str)
StreamName = NewType("StreamName", str)
"""The name of a client's sequence of lease groups, for example for one streaming query. Epochs number the groups."""
ClientId = NewType("ClientId", str)
"""The name that a client, one running program, chooses. The name of a pull client is unique within its group."""
InstanceId = NewType("InstanceId", str)
"""The id of one start of a proxy's process; never reused."""
BrokerQueue = NewType("BrokerQueue", str)
"""The name of a queue on the broker. The queue may be an adopted one."""

NAME_LENGTH_MAX = 64
NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
QUEUES_MAX = 256
DEFAULT_GROUP = GroupName("default")
TRANSIENT_PREFIX = "~"
"""Prefix of the copy ids of transient messages, which have no stable identity. These ids are valid until the channel
that delivered the messages ends."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BOUND_QUEUE = re.compile(r"popgate:([A-Za-z0-9._-]{1,64}):(\d{1,3})")


class Subscription(NamedTuple):
    """A group of a topic. Each subscription has one consume mode, one policy and its own statistics."""

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

    ``queues[i]`` is the queue with index i. If ``adopted``, popgate did not declare these queues: it leaves their type,
    arguments and publishers unchanged, and never deletes them. popgate always declares the dead-letter queue ``dead``.
    """

    subscription: Subscription
    queues: Sequence[BrokerQueue]
    dead: BrokerQueue
    adopted: bool = False
    unique_message_ids: bool = False
    """Whether the admin has declared that ``message_id`` is unique in the adopted queues. If so, it serves as the copy
    id."""

    def queue_ids(self) -> list[QueueId]:
        return [QueueId(*self.subscription, index) for index in range(len(self.queues))]


def transient_copy_id(instance: str, epoch: int, number: int) -> CopyId:
    """Return a copy id for a message without a stable identity."""
    return CopyId(f"{TRANSIENT_PREFIX}{instance}.{epoch}.{number}")


def is_transient(copy_id: CopyId) -> bool:
    """Return whether the copy id belongs to a transient message.

    The copy id, and every lease of the copy, is valid only until the channel that delivered the message ends.
    """
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
    """Return the topic and the index in a name made by ``bound_queue``. Return None if ``target`` names one queue."""
    match = _BOUND_QUEUE.fullmatch(target)
    return None if match is None else (TopicName(match[1]), int(match[2]))


def queue_index(ordering_key: str, queue_count: int) -> int:
    """Return the index of the queue for an ordering key.

    The index is the same in every process, and must not change in later versions.
    """
    return crc32(ordering_key.encode()) % queue_count


def _checked(value: str, field: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise InvalidRequest(
            f"{field} must be 1 to {NAME_LENGTH_MAX} characters of A-Z a-z 0-9 . _ -, not {value[:80]!r}", field=field
        )
    return value
