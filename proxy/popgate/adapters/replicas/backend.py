"""Observes and changes the replicas of a RabbitMQ virtual host. Each task uses the best interface that is available:

to see queues and nodes     the management API; otherwise ``rabbitmqctl``
to see streams' members     ``rabbitmqctl``: the API's short listing omits them (3.10, 4.0 and 4.3)
to see maintenance          the management API if it reports it (3.11.19, 3.12.1 and newer);
                            otherwise ``rabbitmqctl``
to change quorum queues     ``POST``/``DELETE /api/queues/quorum/...`` if the broker reports these endpoints
                            (3.11.19, 3.12.1 and newer; an administrator may have disabled them);
                            otherwise ``rabbitmq-queues``
to change streams           ``rabbitmq-streams``: no RabbitMQ has an endpoint for this
to see consumers' nodes     the management API's statistics
to move a queue's leader    ``rabbitmq-queues`` (4.2.9, 4.3.3 and newer); HTTP can only rebalance all leaders
"""

import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.reading import (
    Row,
    as_list,
    as_object,
    drained_nodes,
    names,
    nodes_of_api,
    nodes_of_status,
    owner_nodes,
    queue_ref,
    quorum_members,
    replica_queue,
    stream_members,
    zone_of_tags,
)
from popgate.adapters.replicas.tools import BrokerTools
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.replicas import (
    MemberState,
    Observation,
    QueueKind,
    QueueRef,
    ReplicaNode,
    ReplicaQueue,
)
from popgate.ports.replicas import Proof, ReplicaBroker, ReplicaCapabilities, ReplicaRefused

_log = logging.getLogger(__name__)

SLOW_FACTS_SECONDS = 20.0
"""Maximum age, in seconds, of three kinds of cached data: maintenance states that a tool reported, tags of nodes, and
the nodes of the queues' consumers."""
STREAMS_FORGET_FROM = (3, 13)
"""First version of RabbitMQ in which popgate uses ``rabbitmq-streams delete_replica`` to remove a replica on a node
that is down. Earlier versions refuse this. Some late 3.12 versions would permit it, but popgate does not use it
there."""
ALREADY_LEADS = "already the leader"
LISTED = ("name", "type", "members", "online", "leader", "messages", "arguments")
NO_SUCH_QUEUE = re.compile(r"\bnot_found\b|\bwas not found\b")
"""Matches the answer of ``rabbitmq-queues quorum_status`` if the queue does not exist. RabbitMQ 3.10 answers with the
first pattern, 4.0 and 4.3 with the second."""
NOT_IN_CLUSTER = "not a cluster member"
"""Part of the answer of ``DELETE .../replicas/delete`` if the node of the member was removed from the cluster. Since
RabbitMQ 4.2.5 and 4.3.0 (rabbit_mgmt_nodes:require_node_name), this endpoint can't remove such a member, but
``rabbitmq-queues delete_member`` can."""
NO_WAY = (
    "give its management API with --management-url, or a way to its command line tools with --replica-commands (such "
    "as 'ssh rabbit-1' or 'kubectl exec rabbit-0 --')"
)
NO_WAY_TO_CHANGE = (
    "this RabbitMQ has no endpoint to change them (3.11.19, 3.12.1 and newer have one for quorum queues, unless it "
    "is disabled), and its command line tools can't be run here; configure them with --replica-commands"
)


class RabbitReplicas:
    """Observes and changes the replicas of the queues in one virtual host.

    ``management`` or ``tools`` is None if it is not configured. ``zones`` contains zones by node name, which override
    the tags of nodes. If ``sees_owners`` is True, an observation also contains the node to which the consumer of each
    queue is connected.
    """

    def __init__(
        self,
        vhost: str,
        management: Management | None,
        tools: BrokerTools | None,
        zones: Mapping[str, str],
        *,
        sees_owners: bool = False,
    ) -> None:
        self._vhost = vhost
        self._sees_owners = sees_owners
        self._configured = management
        self._configured_tools = tools
        self._zones = dict(zones)
        self._management: Management | None = None
        self._tools: BrokerTools | None = None
        self._changes_by_api = False
        self._tags: dict[str, Any] = {}
        self._drained: frozenset[str] = frozenset()
        self._drained_at = -SLOW_FACTS_SECONDS
        self._tags_at = -SLOW_FACTS_SECONDS
        self._owner_nodes: dict[str, str] = {}
        self._owner_nodes_at = -SLOW_FACTS_SECONDS

    async def start(self) -> ReplicaCapabilities:
        reasons: list[str] = []
        version, late, by_api = "unknown", False, False
        management, tools = None, None
        if self._configured is not None:
            try:
                version, late, by_api = await self._ask_api(self._configured)
                management = self._configured
            except BrokerUnavailable as error:
                reasons.append(error.detail)
        if self._configured_tools is not None:
            try:
                status = as_object(await self._configured_tools.run_json("rabbitmqctl", "cluster_status"))
                tools = self._configured_tools
                self._drained, self._drained_at = drained_nodes(status), time.monotonic()
                version = version if management is not None else _version_of(status)
            except (BrokerUnavailable, ReplicaRefused) as error:
                reasons.append(error.detail)
        if management is None and tools is None:
            raise BrokerUnavailable(f"RabbitMQ can't be asked about replicas: {'; '.join(reasons) or NO_WAY}; {NO_WAY}")
        # Set these three fields in one step, because changes in progress may be using them.
        self._management, self._tools, self._changes_by_api = management, tools, by_api
        tool = None if tools is None else "rabbitmq-queues"
        return ReplicaCapabilities(
            version=version,
            sees_by="rabbitmqctl" if management is None else "management API",
            changes_quorum_by="management API" if by_api else tool,
            changes_streams_by=None if tools is None else "rabbitmq-streams",
            voters_join_late=late,
            forgets_absent_streams=_release(version) >= STREAMS_FORGET_FROM,
            # Only the management API shows to which node the owner of a queue is connected, and so where its leader
            # should be.
            moves_leaders_by=tool if management is not None and _transfers_leadership(_release(version)) else None,
        )

    async def stop(self) -> None:
        if self._configured is not None:
            await self._configured.close()

    async def observe(self) -> Observation:
        if self._management is None and self._tools is None:
            await self.start()
        if self._management is not None:
            try:
                return await self._observe_by_api(self._management)
            except BrokerUnavailable:
                if self._tools is None:
                    raise
                _log.info("asking rabbitmqctl in place of the management API")
        return await self._observe_by_tools(self._known_tools())

    async def look(self, queue: QueueRef) -> tuple[MemberState, ...]:
        if queue.kind is QueueKind.STREAM:
            return await self._look_at_stream(queue)
        if self._management is not None and (members := await self._look_by_api(self._management, queue)) is not None:
            return members
        if self._tools is None:
            return await self._look_at_listing(queue)
        try:
            rows = await self._tools.run_json(
                "rabbitmq-queues", "quorum_status", "--vhost", queue.vhost, *_named(queue)
            )
        except ReplicaRefused as error:
            if NO_SUCH_QUEUE.search(error.detail):
                return ()
            raise
        return quorum_members(as_object(row) for row in as_list(rows))

    async def add(self, queue: QueueRef, node: str, prove: Proof) -> None:
        if not await self._changed_by_api("POST", "add", queue, node, prove):
            await self._change_by_tools("add_member", "add_replica", queue, node, prove)

    async def forget(self, queue: QueueRef, node: str, prove: Proof) -> None:
        if not await self._changed_by_api("DELETE", "delete", queue, node, prove):
            await self._change_by_tools("delete_member", "delete_replica", queue, node, prove)

    async def lead(self, queue: QueueRef, node: str, prove: Proof) -> None:
        if self._tools is None:
            raise ReplicaRefused(
                "only RabbitMQ's command line tools move a leader; configure them with --replica-commands"
            )
        words = ("transfer_leadership", "--vhost", queue.vhost, *_named(queue), node)
        try:
            await self._tools.run("rabbitmq-queues", *words, prove=prove)
        except ReplicaRefused as error:
            if ALREADY_LEADS not in error.detail:
                raise

    async def _changed_by_api(self, method: str, what: str, queue: QueueRef, node: str, prove: Proof) -> bool:
        """Make a change with the management API.

        Return False if the command line tools must make the change instead.
        """
        if self._management is None or not self._changes_by_api or queue.kind is QueueKind.STREAM:
            return False
        answer = await self._management.quorum(method, queue.name, f"replicas/{what}", {"node": node}, prove)
        if answer.is_success:
            return True
        reason = _reason(answer)
        if method == "DELETE" and NOT_IN_CLUSTER in reason.lower() and self._tools is not None:
            return False
        raise ReplicaRefused(f"{method} .../replicas/{what} was answered {answer.status_code}: {reason}")

    async def _change_by_tools(self, member: str, replica: str, queue: QueueRef, node: str, prove: Proof) -> None:
        if self._tools is None:
            raise ReplicaRefused(NO_WAY_TO_CHANGE)
        is_stream = queue.kind is QueueKind.STREAM
        tool, command = ("rabbitmq-streams", replica) if is_stream else ("rabbitmq-queues", member)
        await self._tools.run(tool, command, "--vhost", queue.vhost, *_named(queue), node, prove=prove)

    # -- what the broker can -------------------------------------------------------------------------------------------

    async def _ask_api(self, management: Management) -> tuple[str, bool, bool]:
        """Query the management API for three capabilities of the broker.

        Return the version of RabbitMQ, whether a new member joins a quorum queue without a vote, and whether the API
        can change the members of quorum queues.
        """
        overview = await management.overview()
        version = str(overview.get("rabbitmq_version") or overview.get("management_version") or "unknown")
        by_api = await management.allows("POST", "replicas/add") and await management.allows(
            "DELETE", "replicas/delete"
        )
        flag = await management.has_feature_flag("quorum_queue_non_voters")
        return version, flag if flag is not None else _release(version) >= (4, 0), by_api

    # -- observing -----------------------------------------------------------------------------------------------------

    async def _observe_by_api(self, management: Management) -> Observation:
        node_rows = await management.nodes()
        rows = [(ref, row) for row in await management.queues() if (ref := queue_ref(self._vhost, row)) is not None]
        policies = await management.policies()
        await self._learn_slow_facts(management, tells_maintenance=any("being_drained" in row for row in node_rows))
        seen = [(ref, replica_queue(ref, row, policies, self._owner_nodes)) for ref, row in rows]
        missing = {ref for ref, queue in seen if queue is None}
        if missing and self._tools is not None:
            found = await self._found(self._tools, missing, policies)
            seen = [(ref, found.get(ref) if queue is None else queue) for ref, queue in seen]
        zones = {node: zone for node, tags in self._tags.items() if (zone := zone_of_tags(tags)) is not None}
        return _observation(nodes_of_api(node_rows, zones | self._zones, self._drained), seen)

    async def _found(
        self, tools: BrokerTools, missing: Collection[QueueRef], policies: Sequence[Row]
    ) -> dict[QueueRef, ReplicaQueue | None]:
        """Read the ``missing`` queues with the tools, because the management API did not show their members.

        If the tools fail, return an empty dictionary.
        """
        try:
            listed = await self._listed(tools)
        except (BrokerUnavailable, ReplicaRefused) as error:
            _log.info("the members of some queues are unknown", extra={"queues": len(missing), "reason": error.detail})
            return {}
        return {ref: replica_queue(ref, row, policies) for ref, row in listed if ref in missing}

    async def _learn_slow_facts(self, management: Management, *, tells_maintenance: bool) -> None:
        now = time.monotonic()
        if now - self._tags_at >= SLOW_FACTS_SECONDS:
            self._tags, self._tags_at = await management.tags_by_node(), now
        if not tells_maintenance and self._tools is not None and now - self._drained_at >= SLOW_FACTS_SECONDS:
            try:
                self._drained = drained_nodes(as_object(await self._tools.run_json("rabbitmqctl", "cluster_status")))
            except (BrokerUnavailable, ReplicaRefused) as error:
                _log.warning("can't find out which nodes are in maintenance", extra={"reason": error.detail})
            self._drained_at = now
        if self._sees_owners and now - self._owner_nodes_at >= SLOW_FACTS_SECONDS:
            try:
                self._owner_nodes = owner_nodes(await management.consumers())
            except BrokerUnavailable as error:  # replicas can be maintained without this
                self._owner_nodes = {}
                _log.warning("can't find out where consumers are", extra={"reason": error.detail})
            self._owner_nodes_at = now

    async def _observe_by_tools(self, tools: BrokerTools) -> Observation:
        try:
            status = as_object(await tools.run_json("rabbitmqctl", "cluster_status"))
            listed = await self._listed(tools)
        except ReplicaRefused as error:
            raise BrokerUnavailable(error.detail) from error
        return _observation(
            nodes_of_status(status, self._zones), [(ref, replica_queue(ref, row)) for ref, row in listed]
        )

    async def _listed(self, tools: BrokerTools) -> list[tuple[QueueRef, Row]]:
        rows = await tools.run_json("rabbitmqctl", "list_queues", "--vhost", self._vhost, *LISTED)
        objects = [as_object(row) for row in as_list(rows)]
        return [(ref, row) for row in objects if (ref := queue_ref(self._vhost, row)) is not None]

    def _known_tools(self) -> BrokerTools:
        if self._tools is None:
            raise BrokerUnavailable(f"RabbitMQ can't be asked about replicas; {NO_WAY}")
        return self._tools

    # -- one queue -----------------------------------------------------------------------------------------------------

    async def _look_by_api(self, management: Management, queue: QueueRef) -> tuple[MemberState, ...] | None:
        """Return the members of a quorum queue from the management API, or None if the API does not show them.

        Before RabbitMQ 3.13, the API has no endpoint for this. Before 4.3, each node answers this request with 500
        while the node of any member is down. If the queue does not exist, return an empty tuple.
        """
        if not self._changes_by_api:
            return None
        try:
            answer = await management.quorum("GET", queue.name, "status")
        except BrokerUnavailable:
            return None
        if answer.status_code == 404 and await management.queue(queue.name) is None:
            return ()
        try:
            rows = as_list(answer.json()) if answer.is_success else []
        except ValueError:
            rows = []
        return quorum_members(as_object(row) for row in rows) or None

    async def _look_at_listing(self, queue: QueueRef) -> tuple[MemberState, ...]:
        """Return the members of a queue from the listing of queues.

        The listing shows only the nodes of the members, which of them are online, and which is the leader.
        """
        assert self._management is not None, "there is one way at least"
        row = await self._management.queue(queue.name)
        if row is None:
            return ()
        online = names(row.get("online"))
        return tuple(
            MemberState(node=name, is_online=name in online, is_leader=name == row.get("leader"))
            for name in sorted(names(row.get("members")))
        )

    async def _look_at_stream(self, queue: QueueRef) -> tuple[MemberState, ...]:
        tools = self._known_tools()
        listed = [row for ref, row in await self._listed(tools) if ref == queue]
        if not listed:
            return ()
        rows = await tools.run_json("rabbitmq-streams", "stream_status", "--vhost", queue.vhost, *_named(queue))
        return stream_members(
            names(listed[0].get("members")), names(listed[0].get("online")), map(as_object, as_list(rows))
        )


def _named(queue: QueueRef) -> tuple[str, str]:
    """Return the queue's name as arguments for a command line tool, after ``--``.

    ``--`` is needed because the name may start with a dash.

    Raises: ReplicaRefused if the name contains a NUL.
    """
    if "\0" in queue.name:
        raise ReplicaRefused("a queue with a NUL in its name can't be named to RabbitMQ's tools")
    return "--", queue.name


def _observation(nodes: Sequence[ReplicaNode], seen: Iterable[tuple[QueueRef, Any]]) -> Observation:
    pairs = list(seen)
    if not any(node.is_running for node in nodes):  # members on nodes that are not listed would count as removed
        raise BrokerUnavailable("RabbitMQ reports no running node")
    return Observation(
        nodes=tuple(nodes),
        queues=tuple(queue for _, queue in pairs if queue is not None),
        unseen=tuple(ref for ref, queue in pairs if queue is None),
    )


def _release(version: str) -> tuple[int, ...]:
    """Return the first two or three numbers of ``version``, or an empty tuple if it does not start with a version."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return () if numbers is None else tuple(int(number) for number in numbers.groups() if number is not None)


def _transfers_leadership(release: tuple[int, ...]) -> bool:
    """Return whether ``rabbitmq-queues`` supports ``transfer_leadership``, which RabbitMQ 4.2.9 and 4.3.3 added."""
    return (4, 2, 9) <= release < (4, 3) or release >= (4, 3, 3)


def _version_of(status: Row) -> str:
    """Return the lowest version of any node in the output of ``cluster_status``, or "unknown"."""
    versions = [str(as_object(node).get("rabbitmq_version")) for node in as_object(status.get("versions")).values()]
    return min(versions, default="unknown")


def _reason(answer: Any) -> str:
    """Return the reason in RabbitMQ's answer, which is ``{"error": ..., "reason": ...}``."""
    try:
        body = answer.json()
        return str(body.get("reason") or body.get("error"))
    except (ValueError, AttributeError):
        return str(answer.reason_phrase)


_conforms: type[ReplicaBroker] = RabbitReplicas
