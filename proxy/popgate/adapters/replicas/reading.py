"""Converts answers of RabbitMQ's management API and command line tools to types of the domain. Does no I/O.

The formats were read in RabbitMQ's source (3.10.8, 3.13.7, 4.1.0 and 4.3.5), and tested with 3.10.8. Because another
version may answer differently, a missing or invalid value is treated as unknown, and never causes an error.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from popgate.domain.replicas import (
    NATIVE_ARGUMENT,
    NATIVE_POLICY_KEY,
    QUEUE_ARGUMENT,
    Asked,
    MemberState,
    QueueKind,
    QueueRef,
    ReplicaNode,
    ReplicaQueue,
)

Row: TypeAlias = Mapping[str, Any]

POSITIONS = ("Last Log Index", "Log Index")
"""Names of the field that contains the log position of a member in ``quorum_status``: the first since RabbitMQ 3.13,
the second before."""
_ALIASES = {"rabbit_quorum_queue": QueueKind.QUORUM, "rabbit_stream_queue": QueueKind.STREAM}
"""Queue types by the names of RabbitMQ's modules. Some listings contain these names instead of the types."""
ZONE_TAGS = ("zone", "availability_zone")
_APPLIES_TO = {
    QueueKind.QUORUM: frozenset({"all", "queues", "quorum_queues"}),
    QueueKind.STREAM: frozenset({"all", "queues", "streams"}),
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m|\W?\[[0-9;]+m")
"""Matches the colour codes that ``cluster_status`` adds to maintenance states, even in JSON output. Their escape
character may be missing."""


def queue_ref(vhost: str, row: Row) -> QueueRef | None:
    """Return the reference to the queue in ``row``, or None if it is neither a quorum queue nor a stream."""
    kind = _ALIASES.get(str(row.get("type")), row.get("type"))
    name = row.get("name")
    if kind not in (QueueKind.QUORUM, QueueKind.STREAM) or not isinstance(name, str):
        return None
    return QueueRef(vhost, name, QueueKind(kind))


def replica_queue(
    ref: QueueRef, row: Row, policies: Sequence[Row] = (), owner_nodes: Mapping[str, str] = MappingProxyType({})
) -> ReplicaQueue | None:
    """Return the queue ``ref`` as ``row`` describes it, or None if ``row`` contains no members.

    The row of a queue without a leader contains no members. In the listing without statistics, the rows of streams
    contain no members either.
    """
    members = names(row.get("members"))
    if not members:
        return None
    leader, messages = row.get("leader") or row.get("node"), row.get("messages")
    return ReplicaQueue(
        ref=ref,
        members=members,
        online=names(row.get("online")) & members,
        leader=leader if isinstance(leader, str) else None,
        owner_node=owner_nodes.get(ref.name),
        messages=messages if isinstance(messages, int) else None,
        asked=_asked_by_argument(_arguments(row.get("arguments"))),
        broker_asked=_asked_by_policy(ref, policies),
    )


def owner_nodes(rows: Iterable[Row]) -> dict[str, str]:
    """Return the node to which the active consumer of each queue is connected, from ``GET /api/consumers``.

    Queues with active consumers on several nodes are left out.
    """
    found: dict[str, set[object]] = {}
    for row in rows:
        queue = as_object(row.get("queue")).get("name")
        if isinstance(queue, str) and row.get("active") is True:
            found.setdefault(queue, set()).add(as_object(row.get("channel_details")).get("node"))
    only = {queue: next(iter(nodes)) for queue, nodes in found.items() if len(nodes) == 1}
    return {queue: node for queue, node in only.items() if isinstance(node, str)}


def names(value: object) -> frozenset[str]:
    return frozenset(name for name in as_list(value) if isinstance(name, str))


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, otherwise an empty list."""
    return cast("list[object]", value) if isinstance(value, list) else []


def as_object(value: object) -> Row:
    """Return ``value`` if it is an object, otherwise an empty object."""
    return cast("Row", value) if isinstance(value, dict) else {}


def _arguments(value: object) -> Row:
    """Return the arguments of a queue by name. The API reports an object, the tools a list of (name, type, value)."""
    rows = [as_list(row) for row in as_list(value)]
    return as_object(value) or {row[0]: row[2] for row in rows if len(row) == 3}


def _asked_by_argument(arguments: Row) -> Asked | None:
    for name in (QUEUE_ARGUMENT, NATIVE_ARGUMENT):
        count = arguments.get(name)
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            return Asked(count, f"argument {name}")
    return None


def _asked_by_policy(ref: QueueRef, policies: Sequence[Row]) -> Asked | None:
    """Return the replica count in the policy that RabbitMQ applies to the queue, or None.

    RabbitMQ applies the matching policy with the highest priority.
    """
    matching = [
        policy
        for policy in policies
        if policy.get("apply-to", "all") in _APPLIES_TO[ref.kind] and _matches(str(policy.get("pattern", "")), ref.name)
    ]
    if not matching:
        return None
    chosen = max(matching, key=lambda policy: _number(policy.get("priority")))
    count = as_object(chosen.get("definition")).get(NATIVE_POLICY_KEY)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return None
    return Asked(count, f"RabbitMQ policy {chosen.get('name')}")


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # Erlang's regular expressions have more features than Python's
        return False


# -- nodes ------------------------------------------------------------------------------------------------------------


def nodes_of_api(rows: Iterable[Row], zones: Mapping[str, str], drained: Iterable[str] = ()) -> tuple[ReplicaNode, ...]:
    """Return the nodes in the answer of ``GET /api/nodes``.

    The answer contains ``being_drained`` (in maintenance) since RabbitMQ 3.11.19 and 3.12.1. ``drained`` are other
    nodes that are known to be in maintenance.
    """
    in_maintenance = set(drained)
    return tuple(
        ReplicaNode(
            name=name,
            is_running=row.get("running") is True,
            is_cut_off=bool(row.get("partitions")),
            in_maintenance=row.get("being_drained") is True or name in in_maintenance,
            has_alarm=row.get("mem_alarm") is True or row.get("disk_free_alarm") is True,
            zone=zones.get(name),
            memory_share=_share(row.get("mem_used"), row.get("mem_limit")),
            disk_share=_share(row.get("disk_free_limit"), row.get("disk_free")),
        )
        for row in sorted(rows, key=lambda row: str(row.get("name")))
        for name in [row.get("name")]
        if isinstance(name, str)
    )


def _share(part: object, whole: object) -> float:
    if isinstance(part, (int, float)) and isinstance(whole, (int, float)) and whole > 0:
        return min(1.0, part / whole)
    return 0.0


def nodes_of_status(status: Row, zones: Mapping[str, str]) -> tuple[ReplicaNode, ...]:
    """Return the nodes in the output of ``rabbitmqctl cluster_status``.

    It does not show their use of memory and disk.
    """
    running, drained = names(status.get("running_nodes")), drained_nodes(status)
    partitions = as_object(status.get("partitions"))
    alarms = names([as_object(alarm).get("node") for alarm in as_list(status.get("alarms"))])
    cluster = names(status.get("disk_nodes")) | names(status.get("ram_nodes")) | running
    return tuple(
        ReplicaNode(
            name=name,
            is_running=name in running,
            is_cut_off=bool(partitions.get(name)),
            in_maintenance=name in drained,
            has_alarm=name in alarms,
            zone=zones.get(name),
        )
        for name in sorted(cluster)
    )


def drained_nodes(status: Row) -> frozenset[str]:
    """Return the nodes that are in maintenance according to the output of ``cluster_status``."""
    said = as_object(status.get("maintenance_status"))
    return frozenset(
        name for name, text in said.items() if not _ESCAPE.sub("", str(text)).strip().startswith(("not ", "unknown"))
    )


def zone_of_tags(tags: Any) -> str | None:
    """Return the zone in the ``node_tags`` of a node, or None. ``GET /api/overview`` shows them since RabbitMQ 4.0."""
    zones = [zone for name in ZONE_TAGS if isinstance(zone := as_object(tags).get(name), str) and zone]
    return zones[0] if zones else None


# -- members ----------------------------------------------------------------------------------------------------------


def quorum_members(rows: Iterable[Row]) -> tuple[MemberState, ...]:
    """Return the members in the answer of ``quorum_status`` or ``GET .../status``.

    A member without a log position is down.
    """
    members: list[MemberState] = []
    for row in rows:
        if not isinstance(row.get("Node Name"), str):
            continue
        position = next((row[name] for name in POSITIONS if isinstance(row.get(name), int)), None)
        members.append(
            MemberState(
                node=str(row.get("Node Name")),
                is_online=position is not None,
                is_leader=row.get("Raft State") == "leader",
                is_voter=row.get("Membership", "voter") in ("voter", "", "unknown"),
                position=position,
            )
        )
    return tuple(members)


def stream_members(members: Iterable[str], online: Iterable[str], rows: Iterable[Row]) -> tuple[MemberState, ...]:
    """Return the ``members`` of a stream. ``rows`` are the output of ``stream_status`` about them.

    The output contains only the members that answer. ``online`` contains the members that are online according to the
    listing of queues. A member counts as online only if both are true.
    """
    states = {str(row.get("node")): row for row in rows}
    alive = set(online)
    return tuple(
        MemberState(
            node=name,
            is_online=name in alive and name in states,
            is_leader=states.get(name, {}).get("role") == "writer",
            position=_offset(states.get(name, {})),
        )
        for name in sorted(members)
    )


def _offset(row: Row) -> int | None:
    offset = row.get("offset")
    return offset if isinstance(offset, int) else None
