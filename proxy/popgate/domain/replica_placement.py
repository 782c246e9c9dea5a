"""Where a new replica goes, unless a plug-in says otherwise: another zone first, then where there is the most room."""

from collections import Counter
from collections.abc import Sequence

from popgate.domain.replicas import ReplicaNode, ReplicaQueue

PRESSURE_STEP = 0.1
"""Pressures that are as close as that are one: otherwise every megabyte would decide."""


def spread(queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]) -> Sequence[str]:
    """The zones with the fewest members first, then the fewest replicas, then the least pressure on memory and disk.

    A node without a zone is a zone of its own. Down members count in their zones: they may come back.
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
