"""Ranks the nodes for a new replica, unless a plug-in does: other zones first, then the nodes with the most room."""

from collections import Counter
from collections.abc import Sequence

from popgate.domain.replicas import ReplicaNode, ReplicaQueue

PRESSURE_STEP = 0.1
"""Step to which pressures are rounded (a share from 0 to 1); without it, every megabyte would decide."""


def spread(queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]) -> Sequence[str]:
    """Rank by fewest members in the node's zone, then by fewest replicas, then by least pressure on memory and disk.

    A node without a zone is a zone of its own. Members that are down count in their zones: they may come back.
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
