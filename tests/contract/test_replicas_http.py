"""Replicas by RabbitMQ's HTTP endpoints (3.11.19, 3.12.1, 3.13 and 4.x), with the command line tools out of reach.

The tests' RabbitMQ is 3.10, which has no such endpoints, and no newer one can be installed beside it. So what answers
here is a real HTTP server with answers derived from RabbitMQ's source, v3.13.7 and v4.1.0 (``support.modern_replicas``
cites each module): this shows what popgate asks and how it reads such answers, not that a broker gives them.
"""

import copy
from collections.abc import AsyncGenerator, Iterator

import pytest
import pytest_asyncio

from popgate.adapters.replicas.backend import RabbitReplicas
from popgate.adapters.replicas.management import Management
from popgate.domain.errors import BrokerUnavailable, LockLost
from popgate.domain.replica_plan import Ages, ReplicaLimits, Verdict, replica_plan
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import Change, ChangeKind, QueueKind, QueueRef
from popgate.ports.replicas import ReplicaRefused
from popgate.replicas.changing import Ending, carry_out
from popgate.replicas.options import KeeperOptions
from popgate.runtime.clocks import SystemClock
from support.modern_replicas import ModernManagement, ModernQueue, ModernRabbit

A, B, C = "rabbit@a", "rabbit@b", "rabbit@c"
ORDERS = QueueRef("/", "orders/eu", QueueKind.QUORUM)
AT_ONCE = ReplicaLimits(recovery_interval_seconds=0)


@pytest.fixture(params=["3.13.7", "4.1.0"])
def rabbit(request: pytest.FixtureRequest) -> ModernRabbit:
    return ModernRabbit(version=request.param, queues={ORDERS.name: ModernQueue([A, B], [A, B])})


@pytest.fixture
def management(rabbit: ModernRabbit) -> Iterator[ModernManagement]:
    with ModernManagement(rabbit) as server:
        yield server


@pytest_asyncio.fixture
async def broker(management: ModernManagement) -> AsyncGenerator[RabbitReplicas]:
    """The first of its two nodes is gone."""
    made = RabbitReplicas("/", Management(["http://guest:guest@127.0.0.1:1", management.url], "/"), None, {C: "west"})
    yield made
    await made.stop()


async def proven() -> None:
    """The lock is held."""


async def carried_out(broker: RabbitReplicas, kind: ChangeKind, node: str, *members: str) -> tuple[Ending, str]:
    change = Change(kind=kind, queue=ORDERS, node=node, reason="as planned", members=frozenset(members))
    return await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)


async def test_a_broker_that_has_the_endpoints_is_changed_by_them(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    can = await broker.start()
    assert (can.version, can.sees_by, can.changes_quorum_by) == (rabbit.version, "management API", "management API")
    assert (can.changes_streams_by, can.voters_join_late) == (None, True)
    assert await carried_out(broker, ChangeKind.ADD, C, A, B) == (Ending.DONE, "as planned")
    assert rabbit.changes == [("POST", ORDERS.name, C)]
    assert not rabbit.queues[ORDERS.name].joining, "it was waited for until the new member has its vote"


async def test_what_it_sees_is_planned_for(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    rabbit.down, rabbit.drained = ["rabbit@d"], [C]
    rabbit.policies = [
        {"name": "low", "pattern": ".*", "apply-to": "all", "priority": 0, "definition": {"target-group-size": 1}},
        {
            "name": "ha",
            "pattern": "^ord",
            "apply-to": "quorum_queues",
            "priority": 9,
            "definition": {"target-group-size": 3},
        },
        {"name": "s", "pattern": "^ord", "apply-to": "streams", "priority": 10, "definition": {"target-group-size": 2}},
    ]
    await broker.start()
    seen = await broker.observe()
    (row,) = replica_plan(seen, ReplicaPolicies(default=1), AT_ONCE, ages=Ages()).rows
    assert (row.wanted, row.asked.source, row.verdict) == (3, "RabbitMQ policy ha", Verdict.NO_NODE)
    assert "rabbit@c is in maintenance" in row.reason
    assert "rabbit@d is down" in row.reason
    zones = {node.name: node.zone for node in seen.nodes}
    assert zones == {A: "east" if rabbit.version.startswith("4") else None, B: None, C: "west", "rabbit@d": None}


async def test_a_member_on_a_removed_node_is_forgotten(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    rabbit.queues[ORDERS.name] = ModernQueue([A, B, "rabbit@gone"], [A, B], {"x-quorum-target-group-size": 3})
    await broker.start()
    (change,) = replica_plan(await broker.observe(), ReplicaPolicies(), AT_ONCE, ages=Ages()).changes
    assert (change.kind, change.node) == (ChangeKind.FORGET, "rabbit@gone")
    assert (await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)).ending is Ending.DONE
    assert rabbit.changes == [("DELETE", ORDERS.name, "rabbit@gone")]


async def test_who_was_there_first_is_not_overtaken(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    await broker.start()
    rabbit.queues[ORDERS.name] = ModernQueue([A, B, C], [A, B, C])
    ending, reason = await carried_out(broker, ChangeKind.ADD, "rabbit@d", A, B)
    assert (ending, rabbit.changes) == (Ending.DROPPED, [])
    assert reason == f"somebody else has changed its members: {A}, {B}, {C}"


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        (ModernQueue([A, B], [A, B], joining={B: 0}), f"{B} must catch up first"),
        (ModernQueue([A, B], [A, B], behind={B: 1_001}), f"{B} must catch up first"),
        (ModernQueue([A, B], [A]), "1 of 2 members answer"),
        (None, "there is no such queue any more"),
    ],
)
async def test_what_is_not_right_any_more_at_the_last_look_is_dropped(
    broker: RabbitReplicas, rabbit: ModernRabbit, queue: ModernQueue | None, reason: str
) -> None:
    await broker.start()
    rabbit.queues = {} if queue is None else {ORDERS.name: copy.deepcopy(queue)}
    assert await carried_out(broker, ChangeKind.ADD, C, A, B) == (Ending.DROPPED, reason)
    assert rabbit.changes == []


async def test_a_member_that_answers_again_is_not_forgotten(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    await broker.start()
    rabbit.queues[ORDERS.name] = ModernQueue([A, B, C], [A, B, C])
    assert await carried_out(broker, ChangeKind.FORGET, C, A, B, C) == (Ending.DROPPED, f"{C} answers again")
    assert rabbit.changes == []


async def test_a_member_that_does_not_catch_up_in_time_is_said(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    await broker.start()
    rabbit.queues[ORDERS.name].behind[C] = 1
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B}))
    outcome = await carry_out(change, broker, KeeperOptions(catch_up_seconds_max=0.1), SystemClock(), proven)
    assert outcome == (Ending.FAILED, f"{C} has not caught up for 0.1 s")


async def test_who_lost_the_lock_meanwhile_changes_nothing(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    async def lost() -> None:
        raise LockLost("somebody else has it")

    await broker.start()
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B}))
    with pytest.raises(LockLost):
        await carry_out(change, broker, KeeperOptions(), SystemClock(), lost)
    assert rabbit.changes == []


async def test_a_refusal_is_told_in_rabbitmqs_words(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    await broker.start()
    with pytest.raises(ReplicaRefused, match=r"POST .*/add was answered 503: node_not_running"):
        await broker.add(ORDERS, "rabbit@d", proven)
    await broker.forget(ORDERS, B, proven)
    with pytest.raises(ReplicaRefused, match=r"DELETE .*/delete was answered 503: last_node"):
        await broker.forget(ORDERS, A, proven)
    with pytest.raises(ReplicaRefused, match=r"404"):
        await broker.add(ORDERS._replace(name="no such"), A, proven)
    assert await broker.look(ORDERS._replace(name="no such")) == ()


async def test_where_an_administrator_has_switched_the_endpoints_off_they_are_not_used(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    rabbit.changes_allowed = False
    assert (await broker.start()).changes_quorum_by is None
    with pytest.raises(ReplicaRefused, match="unless switched off"):
        await broker.add(ORDERS, C, proven)


async def test_who_is_not_known_there_is_told_so(management: ModernManagement) -> None:
    stranger = RabbitReplicas("/", Management([management.url.replace("guest:guest@", "")], "/"), None, {})
    with pytest.raises(BrokerUnavailable, match="refuses this user") as raised:
        await stranger.start()
    assert "guest" not in raised.value.detail
    await stranger.stop()


async def test_who_answered_when_it_was_decided_and_does_not_now_stops_an_addition(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    """The new member's vote would be needed before it has copied anything."""
    await broker.start()
    rabbit.queues[ORDERS.name] = ModernQueue([A, B, C], [A, B])
    all_three = frozenset({A, B, C})
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node="rabbit@d", reason="", members=all_three, online=all_three)
    outcome = await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)
    assert outcome == (Ending.DROPPED, f"{C} answered when that was decided, and does not any more")
    assert rabbit.changes == []
