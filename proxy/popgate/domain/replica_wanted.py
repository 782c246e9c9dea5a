"""How many replicas a queue is to have, and where that number comes from.

The queue's own argument counts first, then the policy of its popgate group, then the most specific of the keeper's
policies whose pattern its name matches, then the broker's policy (``target-group-size``), then the default. 0 asks for
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from popgate.domain.names import BrokerQueue, Subscription
from popgate.domain.replicas import Asked, Observation, ReplicaQueue

REPLICAS_MAX = 99
_WILD = frozenset("*?[")


class ReplicaPolicy(NamedTuple):
    """Queues whose names match ``pattern`` (``*``, ``?`` and ``[...]`` as in a shell) are to have ``replicas``."""

    pattern: str
    replicas: int

    @property
    def specificity(self) -> tuple[bool, int]:
        """A whole name before any pattern; else the more letters are given."""
        given = sum(letter not in _WILD for letter in self.pattern)
        return given == len(self.pattern), given


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """``asked`` answers for one queue."""

    policies: tuple[ReplicaPolicy, ...] = ()
    default: int = 3

    def asked(self, queue: ReplicaQueue) -> Asked:
        said = queue.asked or queue.group_asked
        if said is not None:
            return said
        matching = [policy for policy in self.policies if fnmatchcase(queue.ref.name, policy.pattern)]
        if matching:
            chosen = max(matching, key=lambda policy: (policy.specificity, policy.replicas, policy.pattern))
            return Asked(chosen.replicas, f"policy {chosen.pattern}")
        return queue.broker_asked or Asked(self.default, "default")


class GroupReplicas(NamedTuple):
    """A group's own ``min_replicas``, for its queues and the one of its dead letters."""

    group: Subscription
    replicas: int
    queues: Sequence[BrokerQueue]


def as_groups_ask(seen: Observation, groups: Sequence[GroupReplicas]) -> Observation:
    """``seen``, in which each queue of such a group knows what that asks for."""
    asked = {
        queue: Asked(one.replicas, f"group {one.group.topic}/{one.group.group}")
        for one in groups
        for queue in one.queues
    }
    if not asked:
        return seen
    queues = (replace(queue, group_asked=asked.get(BrokerQueue(queue.ref.name))) for queue in seen.queues)
    return replace(seen, queues=tuple(queues))
