"""Replicas of quorum queues and streams: what a broker has of them, and what may be changed.

Holds the words that the planner (``replica_plan``), the port (``ports.replicas``) and the keeper share; decides
nothing. A *member* of a queue is a replica that the broker counts; it is *online* where it takes part now. A node is
*gone* when it was removed from the cluster, and *down* when it belongs to it and does not run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

QUEUE_ARGUMENT = "x-popgate-min-replicas"
NATIVE_ARGUMENT = "x-quorum-target-group-size"
"""RabbitMQ's own, from 3.13 on; older brokers keep it and ignore it."""
NATIVE_POLICY_KEY = "target-group-size"


class QueueKind(StrEnum):
    QUORUM = "quorum"
    STREAM = "stream"


class QueueRef(NamedTuple):
    vhost: str
    name: str
    kind: QueueKind


class Asked(NamedTuple):
    """How many replicas somebody asks for; ``source`` says who, in words for operators."""

    replicas: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaNode:
    """A node of the cluster. ``memory_share`` and ``disk_share`` go from 0 (nothing used) to 1 (the alarm);
    ``replicas``: how many members of the queues in sight it has."""

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
        """Whether its replicas count."""
        return self.is_running and not self.is_cut_off

    @property
    def unfit_reason(self) -> str | None:
        """Why it gets no replica; None where it may."""
        if not self.is_running:
            return "down"
        if self.is_cut_off:
            return "cut off"
        if self.in_maintenance:
            return "in maintenance"
        return "low on memory or disk" if self.has_alarm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaQueue:
    """A queue as the broker describes it. ``messages``: its backlog, None where that is not told. ``asked``: what its
    own argument says; ``group_asked``: the policy of its popgate group; ``broker_asked``: the broker's for it.
    ``owner_node``: the node to which the queue's active consumer is connected; None where that is not known, or where
    active consumers are on several nodes."""

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
    """One look at the broker. ``unseen``: queues whose members it did not tell this time."""

    nodes: tuple[ReplicaNode, ...]
    queues: tuple[ReplicaQueue, ...]
    unseen: tuple[QueueRef, ...] = ()

    def online(self, queue: ReplicaQueue) -> frozenset[str]:
        """The members that take part, on nodes that run and are not cut off."""
        serving = {node.name for node in self.nodes if node.serves}
        return queue.online & queue.members & serving

    def absent_nodes(self) -> frozenset[str]:
        """Nodes that are down, and those that have members and are not in the cluster any more."""
        cluster = {node.name for node in self.nodes}
        members = {member for queue in self.queues for member in queue.members}
        return frozenset(members - cluster) | {node.name for node in self.nodes if not node.is_running}


class ChangeKind(StrEnum):
    ADD = "add"
    FORGET = "forget"
    LEAD = "lead"
    """The member on the node becomes the queue's leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one queue; it is meant for the ``members`` that the queue had when it was decided, and those of
    them that were ``online``."""

    kind: ChangeKind
    queue: QueueRef
    node: str
    reason: str = field(compare=False)
    members: frozenset[str] = field(compare=False)
    online: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """A member as it answers now. ``position``: how far its log goes; None where that is not known. One that is no
    voter yet is still catching up."""

    node: str
    is_online: bool
    is_leader: bool = False
    is_voter: bool = True
    position: int | None = None


Placement = Callable[[ReplicaQueue, Sequence[ReplicaNode], Sequence[ReplicaNode]], Sequence[str]]
"""``(queue, members, nodes) -> ranked names``: on which of ``nodes`` a new replica had best be, the best first. The
nodes are those that may get one; ``members`` are the nodes that have one, as far as they are in the cluster."""


def majority(count: int) -> int:
    return count // 2 + 1
