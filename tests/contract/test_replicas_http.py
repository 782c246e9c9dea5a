"""Replicas by RabbitMQ's HTTP endpoints (3.11.19, 3.12.1, 3.13 and 4.x), with the command line tools out of reach.

The tests' RabbitMQ is 3.10, which has no such endpoints, and no newer one can be installed beside it. So what answers
here is a real HTTP server with answers derived from RabbitMQ's source, v3.13.7 and v4.1.0 (``support.modern_replicas``
cites each module): this shows what popgate asks and how it reads such answers, not that a broker gives them.
"""

import asyncio
import copy
import random
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from popgate.adapters.replicas.backend import RabbitReplicas
from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.tools import BrokerTools
from popgate.domain.errors import BrokerUnavailable, LockLost
from popgate.domain.locks import LockKind, Slot
from popgate.domain.replica_placement import spread
from popgate.domain.replica_plan import Ages, ReplicaLimits, Verdict, replica_plan
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import Change, ChangeKind, QueueKind, QueueRef
from popgate.locks.grants import Grant
from popgate.ports.replicas import ReplicaRefused
from popgate.replicas.changing import Ending, Outcome, carry_out
from popgate.replicas.events import KeeperRecord
from popgate.replicas.keeper import CAPABILITIES_SECONDS, ReplicaKeeper
from popgate.replicas.keeper_lock import KeeperAtWork
from popgate.replicas.options import KeeperOptions
from popgate.replicas.term import Term
from popgate.replicas.view import FRESH_SECONDS, ReplicaDesk
from popgate.runtime.clocks import ManualClock, SystemClock
from support.modern_replicas import ModernManagement, ModernQueue, ModernRabbit
from support.replicas import program

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


# ---------------------------------------------------------------- the lock


class GrantThroughANodeThatIsCutOff:
    """Its node says yes to what it can answer by itself; nobody gives the token anew."""

    slot = Slot("replica-keeper", LockKind.MUTEX, 1)
    lost = asyncio.Event()
    reason = ""
    fencing_token = 7

    async def verify(self) -> None:
        pass

    async def renew(self) -> int | None:
        raise LockLost("the broker did not give it again")

    async def release(self) -> None:
        pass


_grant: type[Grant] = GrantThroughANodeThatIsCutOff


async def test_a_keeper_whose_node_is_cut_off_changes_nothing_though_that_node_says_yes(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    await broker.start()
    ended = asyncio.get_running_loop().create_future()

    def on_end(change: Change, outcome: Outcome) -> None:
        ended.set_result(outcome)

    grant = GrantThroughANodeThatIsCutOff()
    term = Term(grant, broker, KeeperOptions(), SystemClock(), KeeperRecord(), on_end)
    term.begin(Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B})))
    assert await ended == (Ending.DROPPED, "the broker did not give it again")
    assert rabbit.changes == []


async def test_the_lock_is_proven_anew_before_the_next_node_is_asked(
    management: ModernManagement, rabbit: ModernRabbit
) -> None:
    proofs = list[int]()

    async def prove() -> None:
        proofs.append(1)
        if len(proofs) > 1:
            raise LockLost("it was handed on")

    asks = Management(["http://guest:guest@127.0.0.1:1", management.url], "/")
    with pytest.raises(LockLost):
        await asks.quorum("POST", ORDERS.name, "replicas/add", {"node": C}, prove)
    assert (len(proofs), rabbit.changes) == (2, [])
    await asks.close()


# ---------------------------------------------------------------- half and odd answers


@pytest.mark.parametrize(
    "odd",
    [
        {"queues": (200, {"error": "odd"})},
        {"queues": (200, None)},
        {"queues": (500, [])},
        {"nodes": (200, [])},
        {"nodes": (200, [1, {"running": True}])},
        {"nodes": (200, {"name": A})},
        {"policies": (200, "odd")},
    ],
)
async def test_an_answer_that_makes_no_sense_is_no_answer(
    broker: RabbitReplicas, rabbit: ModernRabbit, odd: dict[str, tuple[int, Any]]
) -> None:
    """Above all it is not taken for a cluster without nodes, whose members would be forgotten."""
    await broker.start()
    rabbit.odd = odd
    with pytest.raises(BrokerUnavailable):
        await broker.observe()


async def test_rows_that_make_no_sense_are_passed_over(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    row = {"name": "q", "type": "quorum", "members": [A, 3], "online": "odd", "arguments": [["x"]], "messages": "many"}
    rabbit.odd = {
        "overview": (200, ["odd"]),
        "queues": (200, [1, None, {"name": 3, "type": "quorum"}, {"name": "r", "type": ["odd"]}, row]),
        "policies": (200, [None, {"pattern": "(", "priority": "high"}, {"definition": 3}]),
    }
    await broker.start()
    seen = await broker.observe()
    assert [(queue.ref.name, queue.members, queue.online) for queue in seen.queues] == [
        ("q", frozenset({A}), frozenset())
    ]


async def test_a_node_that_fails_to_answer_is_not_the_last_one_to_be_asked(management: ModernManagement) -> None:
    failing = ModernRabbit(odd={"nodes": (500, None), "queues": (503, None), "policies": (500, None)})
    with ModernManagement(failing) as first:
        broker = RabbitReplicas("/", Management([first.url, management.url], "/"), None, {})
        assert [queue.ref for queue in (await broker.observe()).queues] == [ORDERS]
        await broker.stop()


async def test_where_the_tools_fail_to_tell_of_streams_quorum_queues_are_seen_yet(
    management: ModernManagement, rabbit: ModernRabbit, tmp_path: Path
) -> None:
    tool = program(tmp_path, "rabbit", """case "$*" in *cluster_status*) echo '{}' ;; *) exit 70 ;; esac""")
    rabbit.queues[ORDERS.name].online = [A]
    rows = [{"name": "s", "type": "stream"}, {"name": "q", "type": "quorum", "members": [A], "online": [A]}]
    rabbit.odd = {"queues": (200, rows)}
    broker = RabbitReplicas("/", Management([management.url], "/"), BrokerTools([tool]), {})
    await broker.start()
    seen = await broker.observe()
    assert ([queue.ref.name for queue in seen.queues], [ref.name for ref in seen.unseen]) == (["q"], ["s"])
    await broker.stop()


# ---------------------------------------------------------------- what the broker can


async def test_a_removed_nodes_member_is_forgotten_by_the_tools_where_the_endpoint_does_not(tmp_path: Path) -> None:
    rabbit = ModernRabbit(version="4.3.5", queues={ORDERS.name: ModernQueue([A, B, "rabbit@gone"], [A, B])})
    script = f"""case "$*" in *cluster_status*) echo '{{}}' ;; *) echo "$@" >> {tmp_path}/asked ;; esac"""
    tools = BrokerTools([program(tmp_path, "rabbit", script)])
    with ModernManagement(rabbit) as server:
        for way in (None, tools):
            broker = RabbitReplicas("/", Management([server.url], "/"), way, {})
            await broker.start()
            if way is None:
                with pytest.raises(ReplicaRefused, match="not a cluster member"):
                    await broker.forget(ORDERS, "rabbit@gone", proven)
            else:
                await broker.forget(ORDERS, "rabbit@gone", proven)
            await broker.stop()
    said = (tmp_path / "asked").read_text()
    assert said == "rabbitmq-queues --quiet delete_member --vhost / -- orders/eu rabbit@gone\n"


async def test_what_is_under_way_does_not_notice_that_the_broker_is_asked_anew_what_it_can(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    await broker.start()
    asking = asyncio.ensure_future(broker.start())
    await asyncio.sleep(0)
    await broker.add(ORDERS, C, proven)
    await asking
    assert rabbit.changes == [("POST", ORDERS.name, C)]


class NobodyAtWork:
    async def acquire(self, wait_seconds: float) -> Grant | None:
        return None

    async def holder(self) -> KeeperAtWork | None:
        return None


def keeper_of(broker: RabbitReplicas, clock: ManualClock) -> ReplicaKeeper:
    return ReplicaKeeper(broker, NobodyAtWork(), KeeperOptions(), place=spread, clock=clock, chance=random.Random(1))


async def test_tools_that_failed_once_are_tried_again(
    management: ModernManagement, rabbit: ModernRabbit, tmp_path: Path
) -> None:
    rabbit.changes_allowed = False
    tool = program(tmp_path, "rabbit", f"[ -e {tmp_path}/well ] || exit 75; echo '{{}}'")
    broker, clock = RabbitReplicas("/", Management([management.url], "/"), BrokerTools([tool]), {}), ManualClock()
    keeper = keeper_of(broker, clock)
    assert (await keeper.capabilities()).changes_quorum_by is None
    (tmp_path / "well").touch()
    clock.advance(CAPABILITIES_SECONDS)
    assert (await keeper.capabilities()).changes_quorum_by == "rabbitmq-queues"
    await broker.stop()


async def test_what_is_shown_is_asked_anew_also_where_the_clock_was_set_back(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    clock = ManualClock()
    desk = ReplicaDesk(keeper_of(broker, clock), clock)
    assert len((await desk.view()).survey.seen.queues) == 1
    rabbit.queues["another"] = ModernQueue([A], [A])
    assert len((await desk.view()).survey.seen.queues) == 1, "so fresh"
    clock.advance(FRESH_SECONDS + 1)
    clock.jump_wall(-86_400)
    assert len((await desk.view()).survey.seen.queues) == 2
