"""How many replicas a queue is to have, and where that number comes from.

The queue's own argument counts first, then the most specific of popgate's policies whose pattern its name matches, then
the broker's policy (``target-group-size``), then the default. 0 asks for nothing.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from popgate.domain.replicas import Asked, ReplicaQueue

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
        if queue.asked is not None:
            return queue.asked
        matching = [policy for policy in self.policies if fnmatchcase(queue.ref.name, policy.pattern)]
        if matching:
            chosen = max(matching, key=lambda policy: (policy.specificity, policy.replicas, policy.pattern))
            return Asked(chosen.replicas, f"policy {chosen.pattern}")
        return queue.broker_asked or Asked(self.default, "default")
