"""Converts a survey to rows (dictionaries). The command line and the HTTP API show the same rows."""

from collections.abc import Sequence
from typing import Any

from popgate.domain.replica_plan import ReplicaPlan
from popgate.domain.replicas import Change, Observation


def queue_rows(plan: ReplicaPlan) -> Sequence[dict[str, Any]]:
    """Return one row for each queue, in the order of the plan: the most endangered queue first."""
    return [
        {
            "queue": row.ref.name,
            "vhost": row.ref.vhost,
            "kind": row.ref.kind.value,
            "members": sorted(row.members),
            "online": sorted(row.online),
            "wanted": row.wanted,
            "asked": row.asked.replicas,
            "source": row.asked.source,
            "verdict": row.verdict.value,
            "reason": row.reason,
            "change": None if row.change is None else change_row(row.change),
        }
        for row in plan.rows
    ]


def change_row(change: Change) -> dict[str, Any]:
    return {"kind": change.kind.value, "queue": change.queue.name, "node": change.node, "reason": change.reason}


def node_rows(seen: Observation) -> Sequence[dict[str, Any]]:
    """Return one row for each node. ``replicas`` is the number of observed queues that have a member on the node."""
    return [
        {
            "node": node.name,
            "running": node.is_running,
            "zone": node.zone,
            "unfit_reason": node.unfit_reason,
            "memory_share": round(node.memory_share, 3),
            "disk_share": round(node.disk_share, 3),
            "replicas": sum(node.name in queue.members for queue in seen.queues),
        }
        for node in seen.nodes
    ]
