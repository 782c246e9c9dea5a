"""Decides how many replicas a queue should have, and names the setting that requires this number.

The first of these settings that exists applies: the queue's own argument, the policy of the queue's popgate group, the
most specific of the keeper's policies whose patterns match the queue's name, the broker's policy
(``target-group-size``), the default. The number 0 means that there is no minimum.
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
    """Requires ``replicas`` of each queue whose name matches ``pattern`` (``*``, ``?`` and ``[...]`` as in a shell)."""

    pattern: str
    replicas: int

    @property
    def specificity(self) -> tuple[bool, int]:
        """The key that sorts policies: patterns without wildcards are the most specific, then those with many literal
        characters."""
        given = sum(letter not in _WILD for letter in self.pattern)
        return given == len(self.pattern), given


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """The keeper's policies and default number. ``asked`` applies the order of precedence to one queue."""

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
    """A group's ``min_replicas``, which applies to its queues and its dead-letter queue."""

    group: Subscription
    replicas: int
    queues: Sequence[BrokerQueue]


def as_groups_ask(seen: Observation, groups: Sequence[GroupReplicas]) -> Observation:
    """Return ``seen`` with ``group_asked`` set in every queue of these groups."""
    asked = {
        queue: Asked(one.replicas, f"group {one.group.topic}/{one.group.group}")
        for one in groups
        for queue in one.queues
    }
    if not asked:
        return seen
    queues = (replace(queue, group_asked=asked.get(BrokerQueue(queue.ref.name))) for queue in seen.queues)
    return replace(seen, queues=tuple(queues))
