"""Describes replicas of quorum queues and streams: a broker's report about them, and the possible changes.

This module defines the types that the planner (``replica_plan``), the port (``ports.replicas``) and the keeper share.
It decides nothing. A *member* of a queue is a replica that the broker counts. A member is *online* if it takes part in
the queue now. A node is *gone* if it was removed from the cluster, and *down* if it is in the cluster but does not run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

QUEUE_ARGUMENT = "x-popgate-min-replicas"
NATIVE_ARGUMENT = "x-quorum-target-group-size"
"""RabbitMQ's own argument for the number of replicas, from 3.13 on. Older versions store it and ignore it."""
NATIVE_POLICY_KEY = "target-group-size"


class QueueKind(StrEnum):
    QUORUM = "quorum"
    STREAM = "stream"


class QueueRef(NamedTuple):
    vhost: str
    name: str
    kind: QueueKind


class Asked(NamedTuple):
    """A wanted number of replicas. ``source`` is a text for operators that names the setting that requires this
    number."""

    replicas: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaNode:
    """A node of the RabbitMQ cluster.

    ``memory_share`` and ``disk_share`` range from 0 (nothing used) to 1 (the alarm). ``replicas`` is the number of
    members of the observed queues on this node.
    """

    name: str
    is_running: bool = True
    is_cut_off: bool = False
    in_maintenance: bool = False
    has_alarm: bool = False
    zone: str | None = None
    memory_share: float = 0.0
    disk_share: float = 0.0
    replicas: int = 0

    @property
    def serves(self) -> bool:
        """Whether replicas on this node count as online."""
        return self.is_running and not self.is_cut_off

    @property
    def unfit_reason(self) -> str | None:
        """The reason why the node can't get a replica, or None if it can."""
        if not self.is_running:
            return "down"
        if self.is_cut_off:
            return "cut off"
        if self.in_maintenance:
            return "in maintenance"
        return "low on memory or disk" if self.has_alarm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaQueue:
    """A queue as the broker describes it.

    ``messages``: the backlog of the queue; None if the broker does not report it. ``asked``, ``group_asked`` and
    ``broker_asked``: the number of replicas that the queue's own argument, its popgate group and the broker's policy
    require. ``owner_node``: the node to which the queue's active consumer is connected; None if that is unknown, or if
    active consumers are on several nodes.
    """

    ref: QueueRef
    members: frozenset[str]
    online: frozenset[str]
    leader: str | None = None
    owner_node: str | None = None
    messages: int | None = 0
    asked: Asked | None = None
    group_asked: Asked | None = None
    broker_asked: Asked | None = None

    @property
    def majority(self) -> int:
        return majority(len(self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation of the broker. ``unseen``: queues whose members the broker did not report this time."""

    nodes: tuple[ReplicaNode, ...]
    queues: tuple[ReplicaQueue, ...]
    unseen: tuple[QueueRef, ...] = ()

    def online(self, queue: ReplicaQueue) -> frozenset[str]:
        """Return the members of ``queue`` that are online, on nodes that run and are not cut off."""
        serving = {node.name for node in self.nodes if node.serves}
        return queue.online & queue.members & serving

    def absent_nodes(self) -> frozenset[str]:
        """Return the nodes that are down, and the nodes that were removed from the cluster but still have members."""
        cluster = {node.name for node in self.nodes}
        members = {member for queue in self.queues for member in queue.members}
        return frozenset(members - cluster) | {node.name for node in self.nodes if not node.is_running}


class ChangeKind(StrEnum):
    ADD = "add"
    FORGET = "forget"
    LEAD = "lead"
    """Make the member on ``node`` the leader of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change to the replicas of one queue.

    ``members`` are the queue's members when the change was decided, and ``online`` those that were online then.
    """

    kind: ChangeKind
    queue: QueueRef
    node: str
    reason: str = field(compare=False)
    members: frozenset[str] = field(compare=False)
    online: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """The present state of a member of a queue, as the member reports it.

    ``position``: the end of the member's log; None if it is unknown. A member that is not yet a voter is still catching
    up.
    """

    node: str
    is_online: bool
    is_leader: bool = False
    is_voter: bool = True
    position: int | None = None


Placement = Callable[[ReplicaQueue, Sequence[ReplicaNode], Sequence[ReplicaNode]], Sequence[str]]
"""``(queue, members, nodes) -> ranked names``: ranks the nodes for a new replica, the best first.

``nodes`` are the nodes that may get the new replica. ``members`` are the nodes of the cluster that already have a
replica of the queue.
"""


def majority(count: int) -> int:
    return count // 2 + 1
