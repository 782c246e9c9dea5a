"""Replicas by RabbitMQ's HTTP endpoints, on three real nodes, with the command line tools out of reach.

4.3 and 4.0 have these endpoints, with different answers in places; 3.10 has none. ``test_replica_keeper_faults`` covers
answers that a real broker can't be made to give.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence

import pytest
import pytest_asyncio

from popgate.adapters.replicas.backend import RabbitReplicas
from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.tools import BrokerTools
from popgate.domain.errors import BrokerUnavailable, LockLost
from popgate.domain.replica_plan import Ages, ReplicaLimits, Verdict, replica_plan
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import Change, ChangeKind, Observation, QueueKind, QueueRef
from popgate.ports.replicas import ReplicaRefused
from popgate.replicas.changing import ChangeOutcome, Ending, carry_out
from popgate.replicas.options import KeeperOptions
from popgate.runtime.clocks import SystemClock
from support.processes import wait_until
from support.rabbitmq import RabbitCluster, RabbitNode
from support.rabbitmq_releases import RabbitRelease
from support.replicas import declare, replicas_of

pytestmark = pytest.mark.rabbitmq_versions("4.0")  # earlier ones have no endpoints for it

STRICT_FROM = (4, 2, 5)
"""From this version on the endpoints reject nodes that are not in the cluster."""
TELLS_OF_LOST_MEMBERS_FROM = (4, 3)
AT_ONCE = ReplicaLimits(recovery_interval_seconds=0)


@pytest.fixture
def cluster(three_nodes: RabbitCluster) -> RabbitCluster:
    if three_nodes.release.version < (3, 11, 19):
        pytest.skip("this RabbitMQ has no endpoints for replicas")
    return three_nodes


@pytest.fixture
def nodes(cluster: RabbitCluster) -> Sequence[RabbitNode]:
    return cluster.nodes


@pytest.fixture
def vhost(nodes: Sequence[RabbitNode]) -> Iterator[str]:
    with nodes[0].own_vhost("replicas") as name:
        yield name


@pytest.fixture
def orders(vhost: str) -> QueueRef:
    return QueueRef(vhost, "orders/eu", QueueKind.QUORUM)


def url(node: RabbitNode) -> str:
    return f"http://guest:guest@127.0.0.1:{node.management_port}"


@pytest_asyncio.fixture
async def broker(nodes: Sequence[RabbitNode], vhost: str) -> AsyncGenerator[RabbitReplicas]:
    """The first address that it asks is gone."""
    zones = {nodes[2].name: "west"}
    made = RabbitReplicas(vhost, Management(["http://guest:guest@127.0.0.1:1", url(nodes[0])], vhost), None, zones)
    await made.start()
    yield made
    await made.stop()


async def proven() -> None:
    """The lock is held."""


def a_change(kind: ChangeKind, queue: QueueRef, node: RabbitNode, *members: RabbitNode) -> Change:
    names = frozenset(member.name for member in members)
    return Change(kind=kind, queue=queue, node=node.name, reason="as planned", members=names, online=names)


async def carried_out(broker: RabbitReplicas, change: Change) -> ChangeOutcome:
    return await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)


def members_of(nodes: Sequence[RabbitNode], queue: QueueRef) -> set[str]:
    return replicas_of(nodes[0], queue.vhost)[queue.name][0]


async def caught_up(broker: RabbitReplicas, queue: QueueRef) -> None:
    """Return when all members vote and have the same log of the queue: a new member needs time for both."""

    async def are_equal() -> bool:
        members = await broker.look(queue)
        return len({member.position for member in members}) == 1 and all(member.is_voter for member in members)

    async with asyncio.timeout(30):
        while not await are_equal():  # noqa: ASYNC110 - it can't be awaited
            await asyncio.sleep(0.1)


async def test_a_broker_that_has_the_endpoints_is_changed_by_them(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef, rabbitmq_release: RabbitRelease
) -> None:
    can = await broker.start()
    assert (can.version, can.sees_by) == (str(rabbitmq_release), "management API")
    assert (can.changes_quorum_by, can.changes_streams_by) == ("management API", None)
    assert can.moves_leaders_by is None, "there is no endpoint that moves one queue's leader"
    assert can.voters_join_late
    first, second, third = nodes
    declare(first, orders.vhost, orders.name, [first, second])
    await caught_up(broker, orders)
    assert await carried_out(broker, a_change(ChangeKind.ADD, orders, third, first, second)) == (
        Ending.DONE,
        "as planned",
    )
    members = {member.node: member for member in await broker.look(orders)}
    assert members.keys() == {node.name for node in nodes}
    assert members[third.name].is_voter, "it was waited for until the new member has its vote"
    assert members[first.name].is_leader
    assert {member.position is None for member in members.values()} == {False}
    await broker.add(orders, third.name, proven)
    await broker.forget(orders, third.name, proven)
    await broker.forget(orders, third.name, proven)
    assert members_of(nodes, orders) == {first.name, second.name}


async def test_what_it_sees_is_planned_for(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef, rabbitmq_release: RabbitRelease
) -> None:
    first, second, third = nodes
    declare(first, orders.vhost, orders.name, [first, second])
    for name, applies_to, priority, size in (
        ("low", "all", 0, 1),
        ("ha", "quorum_queues", 9, 3),
        ("s", "streams", 10, 2),
    ):
        body = {
            "pattern": "^ord",
            "apply-to": applies_to,
            "priority": priority,
            "definition": {"target-group-size": size},
        }
        first.api("PUT", "policies", orders.vhost, name, body=body)
    third.ctl("drain", tool="rabbitmq-upgrade")
    try:
        seen = await broker.observe()
    finally:
        third.ctl("revive", tool="rabbitmq-upgrade")
    (row,) = [
        row for row in replica_plan(seen, ReplicaPolicies(default=1), AT_ONCE, ages=Ages()).rows if row.ref == orders
    ]
    assert (row.wanted, row.asked.source, row.verdict) == (3, "RabbitMQ policy ha", Verdict.NO_NODE)
    assert f"{third.name} is in maintenance" in row.reason
    assert {node.name: node.zone for node in seen.nodes} == {first.name: None, second.name: None, third.name: "west"}


async def test_what_is_not_right_any_more_at_the_last_look_is_dropped(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef
) -> None:
    first, second, third = nodes
    missing = a_change(ChangeKind.ADD, orders, third, first, second)
    assert await carried_out(broker, missing) == (Ending.DROPPED, "the queue does not exist any more")
    declare(first, orders.vhost, orders.name, [first, second, third])
    everyone = ", ".join(node.name for node in nodes)
    assert await carried_out(broker, missing) == (
        Ending.DROPPED,
        f"its members have been changed meanwhile: {everyone}",
    )
    answers = a_change(ChangeKind.FORGET, orders, third, *nodes)
    assert await carried_out(broker, answers) == (Ending.DROPPED, f"{third.name} answers again")
    leads = a_change(ChangeKind.LEAD, orders, first, *nodes)
    assert await carried_out(broker, leads) == (Ending.DROPPED, f"{first.name} is already its leader")
    assert members_of(nodes, orders) == {node.name for node in nodes}


async def test_who_lost_the_lock_meanwhile_changes_nothing(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef
) -> None:
    async def lost() -> None:
        raise LockLost("somebody else has it")

    declare(nodes[0], orders.vhost, orders.name, nodes[:2])
    await caught_up(broker, orders)  # otherwise the change is dropped before it needs the lock
    change = a_change(ChangeKind.ADD, orders, nodes[2], *nodes[:2])
    with pytest.raises(LockLost):
        await carry_out(change, broker, KeeperOptions(), SystemClock(), lost)
    assert members_of(nodes, orders) == {node.name for node in nodes[:2]}


async def test_a_refusal_is_told_in_rabbitmqs_words(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef, rabbitmq_release: RabbitRelease
) -> None:
    declare(nodes[0], orders.vhost, orders.name, nodes[:1])
    is_strict = rabbitmq_release.version >= STRICT_FROM
    refusal = "400: Node is not a cluster member" if is_strict else "503: node_not_running"
    with pytest.raises(ReplicaRefused, match=rf"POST .*/add was answered {refusal}"):
        await broker.add(orders, "no-such@localhost", proven)
    with pytest.raises(ReplicaRefused, match=r"DELETE .*/delete was answered 503: last_node"):
        await broker.forget(orders, nodes[0].name, proven)
    with pytest.raises(ReplicaRefused, match=r"503: not_found"):
        await broker.add(orders._replace(name="no such"), nodes[0].name, proven)
    assert await broker.look(orders._replace(name="no such")) == ()


async def test_where_an_administrator_has_switched_the_endpoints_off_they_are_not_used(
    broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef
) -> None:
    key = "restrictions, [{quorum_queue_replica_operations, [{disabled, true}]}]"
    nodes[0].ctl("eval", f"application:set_env(rabbitmq_management, {key}).")
    try:
        assert (await broker.start()).changes_quorum_by is None
        with pytest.raises(ReplicaRefused, match="unless it is disabled"):
            await broker.add(orders, nodes[2].name, proven)
    finally:
        nodes[0].ctl("eval", "application:unset_env(rabbitmq_management, restrictions).")


async def test_who_is_not_known_there_is_told_so(nodes: Sequence[RabbitNode], vhost: str) -> None:
    stranger = RabbitReplicas(vhost, Management([url(nodes[0]).replace("guest:guest@", "")], vhost), None, {})
    with pytest.raises(BrokerUnavailable, match="refuses this user") as raised:
        await stranger.start()
    assert "guest" not in raised.value.detail
    await stranger.stop()


async def test_a_member_is_forgotten_where_its_node_is_only_down_and_where_it_was_removed(
    cluster: RabbitCluster, broker: RabbitReplicas, nodes: Sequence[RabbitNode], orders: QueueRef
) -> None:
    """If it was removed, the endpoint of 4.2.5 and newer refuses: ``rabbitmq-queues`` does it."""
    first, second, lost = nodes
    version = cluster.release.version
    kept = orders._replace(name="kept")
    for queue in (orders, kept):
        declare(first, orders.vhost, queue.name, nodes)
    tools = BrokerTools([str(first.command_prefix())])
    with_tools = RabbitReplicas(orders.vhost, Management([url(first)], orders.vhost), tools, {})
    await with_tools.start()
    lost.kill()
    try:
        wait_until(lambda: lost.name not in first.running_nodes(), timeout_seconds=20, what="the loss to be seen")
        for way in (broker, with_tools):
            states = {member.node: member for member in await way.look(orders)}
            assert {name: state.is_online for name, state in states.items()} == {
                first.name: True,
                second.name: True,
                lost.name: False,
            }
            # Before 4.3 the endpoint fails if a member's node is down: the listing has no positions, the tools have.
            is_told = version >= TELLS_OF_LOST_MEMBERS_FROM or way is with_tools
            assert (states[first.name].position is not None) == is_told
        assert planned_to_forget(await broker.observe()) == set(), "a node that is down may come back"
        assert planned_to_forget(await broker.observe(), after_seconds=1) == {orders, kept}
        down = a_change(ChangeKind.FORGET, orders, lost, *nodes)
        assert (await carried_out(broker, down)).ending is Ending.DONE

        first.ctl("eval", f"ok = rabbit_db_cluster:forget_member('{lost.name}', false).")
        assert planned_to_forget(await broker.observe()) == {kept}
        removed = a_change(ChangeKind.FORGET, kept, lost, *nodes)
        if version >= STRICT_FROM:
            with pytest.raises(ReplicaRefused, match="not a cluster member"):
                await carried_out(broker, removed)
        assert (await carried_out(with_tools, removed)).ending is Ending.DONE
        assert members_of(nodes, kept) == members_of(nodes, orders) == {first.name, second.name}
    finally:
        await with_tools.stop()
        # It can join again only once it is no longer a member, even after a failure half way.
        first.ctl("eval", f"catch rabbit_db_cluster:forget_member('{lost.name}', false).")
        shutil.rmtree(lost.folder / "mnesia")
        lost.start()
        cluster.wait_whole()


def planned_to_forget(seen: Observation, *, after_seconds: float | None = None) -> set[QueueRef]:
    """Plan as if every absent node had been away for long."""
    limits = ReplicaLimits(recovery_interval_seconds=0, forget_after_seconds=after_seconds)
    ages = Ages(absent=dict.fromkeys(seen.absent_nodes(), 1e6))
    plan = replica_plan(seen, ReplicaPolicies(default=2), limits, ages=ages)
    return {change.queue for change in plan.changes if change.kind is ChangeKind.FORGET}
