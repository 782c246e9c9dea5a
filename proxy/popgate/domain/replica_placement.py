"""Ranks the nodes for a new replica: first the nodes in other zones, then the nodes with the most free resources.

This ranking is used if no placement plug-in is configured, or if the plug-in names no suitable node.
"""

from collections import Counter
from collections.abc import Sequence

from popgate.domain.replicas import ReplicaNode, ReplicaQueue

PRESSURE_STEP = 0.1
"""The pressure on memory or disk, a share from 0 to 1, is rounded to multiples of this step. Without rounding, every
megabyte would change the ranking."""


def spread(queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]) -> Sequence[str]:
    """Return the names of ``nodes``, the best node for a new replica first.

    Nodes with few members in their zone come first, then nodes with few replicas, then nodes with low pressure on
    memory and disk. A node without a zone counts as a separate zone. ``members`` that are down count too, because they
    may return.
    """
    taken = Counter(_zone(member) for member in members)
    ranked = sorted(
        nodes,
        key=lambda node: (
            taken[_zone(node)],
            node.replicas,
            round(max(node.memory_share, node.disk_share) / PRESSURE_STEP),
            node.name,
        ),
    )
    return [node.name for node in ranked]


def _zone(node: ReplicaNode) -> tuple[str, str]:
    return ("node", node.name) if node.zone is None else ("zone", node.zone)
