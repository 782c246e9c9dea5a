"""The plan of replica changes: never too many, never two changes of one queue, and it comes to an end."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.names import BrokerQueue, GroupName, Subscription, TopicName
from popgate.domain.replica_placement import spread
from popgate.domain.replica_plan import Ages, QueuePlan, ReplicaLimits, ReplicaPlan, Verdict, replica_plan
from popgate.domain.replica_wanted import GroupReplicas, ReplicaPolicies, ReplicaPolicy, as_groups_ask
from popgate.domain.replicas import (
    Asked,
    Change,
    ChangeKind,
    Observation,
    QueueKind,
    QueueRef,
    ReplicaNode,
    ReplicaQueue,
    majority,
)

NODES = tuple(f"n{number}" for number in range(1, 6))
FOR_LONG = 1e6
GONE = "n9"
"""A node that was removed from the cluster."""


def ref(name: str, kind: QueueKind = QueueKind.QUORUM) -> QueueRef:
    return QueueRef("/", name, kind)


def a_queue(name: str, members: str, *, online: str | None = None, messages: int = 0, asked: int = 3) -> ReplicaQueue:
    """Return a queue, with its members by the numbers of their nodes."""
    return ReplicaQueue(
        ref=ref(name),
        members=frozenset(f"n{number}" for number in members),
        online=frozenset(f"n{number}" for number in (members if online is None else online)),
        messages=messages,
        asked=Asked(asked, "argument"),
    )


def a_cluster(*queues: ReplicaQueue, down: str = "", nodes: Sequence[ReplicaNode] | None = None) -> Observation:
    names = nodes or [ReplicaNode(name=name, is_running=name[1:] not in down) for name in NODES]
    return Observation(nodes=tuple(names), queues=queues)


def planned(
    seen: Observation,
    limits: ReplicaLimits | None = None,
    *,
    ages: Ages | None = None,
    busy: Sequence[Change] = (),
    policies: ReplicaPolicies | None = None,
) -> ReplicaPlan:
    """Plan as if the situation had lasted for long."""
    names = {node.name for node in seen.nodes} | {member for queue in seen.queues for member in queue.members}
    old = Ages(short={queue.ref: FOR_LONG for queue in seen.queues}, absent=dict.fromkeys(names, FOR_LONG))
    return replica_plan(seen, policies or ReplicaPolicies(), limits or ReplicaLimits(), ages=ages or old, busy=busy)


def the_row(seen: Observation, limits: ReplicaLimits | None = None, *, ages: Ages | None = None) -> QueuePlan:
    (row,) = planned(seen, limits, ages=ages).rows
    return row


# ---------------------------------------------------------------- one queue


def test_a_queue_that_has_what_it_wants_is_left_alone() -> None:
    row = the_row(a_cluster(a_queue("q", "123")))
    assert (row.verdict, row.change, row.wanted) == (Verdict.ENOUGH, None, 3)


def test_more_than_wanted_are_left_alone_and_said() -> None:
    row = the_row(a_cluster(a_queue("q", "12345")))
    assert row.verdict is Verdict.ENOUGH
    assert row.reason == "2 more than wanted are left alone"


def test_a_count_above_the_number_of_nodes_is_capped_and_said() -> None:
    row = the_row(a_cluster(a_queue("q", "12345", asked=7)))
    assert (row.verdict, row.wanted) == (Verdict.ENOUGH, 5)
    assert "7 are requested, but there are only 5 nodes" in row.reason


def test_a_lost_member_is_replaced_and_stays_a_member() -> None:
    row = the_row(a_cluster(a_queue("q", "123", online="12"), down="3"))
    assert row.change is not None
    assert row.change.kind is ChangeKind.ADD
    assert row.change.node in ("n4", "n5")


def test_nothing_is_done_before_the_recovery_interval_has_passed() -> None:
    seen = a_cluster(a_queue("q", "123", online="12"), down="3")
    for seconds, verdict in ((0.0, Verdict.WAITING), (59.9, Verdict.WAITING), (60.0, Verdict.ADD)):
        assert the_row(seen, ages=Ages(short={ref("q"): seconds})).verdict is verdict


def test_a_member_on_a_removed_node_is_forgotten_before_another_one_is_added() -> None:
    row = the_row(a_cluster(a_queue("q", "129", online="12")))
    assert row.change is not None
    assert (row.change.kind, row.change.node) == (ChangeKind.FORGET, GONE)


def test_a_leader_is_moved_to_the_node_of_the_queues_owner_where_that_is_asked_for_and_offered() -> None:
    queue = replace(a_queue("q", "123"), leader="n1", owner_node="n2")
    seen, asked = a_cluster(queue), ReplicaLimits(move_leaders=True)

    def verdict_after(seconds: float) -> Verdict:
        return the_row(seen, asked, ages=Ages(astray={queue.ref: seconds})).verdict

    assert the_row(seen).verdict is Verdict.ENOUGH
    assert [verdict_after(seconds) for seconds in (0.0, 60.0)] == [Verdict.WAITING, Verdict.LEAD]
    (change,) = replica_plan(
        seen, ReplicaPolicies(), replace(asked, recovery_interval_seconds=0.0), ages=Ages()
    ).changes
    assert (change.kind, change.node) == (ChangeKind.LEAD, "n2")
    not_offered = replica_plan(seen, ReplicaPolicies(), asked, ages=Ages(), moves_leaders=False)
    assert not_offered.rows[0].verdict is Verdict.ENOUGH


@pytest.mark.parametrize(
    ("queue", "verdict"),
    [
        (a_queue("has no single owner", "123"), Verdict.ENOUGH),
        (replace(a_queue("is led there", "123"), owner_node="n1"), Verdict.ENOUGH),
        (replace(a_queue("has no replica there", "123"), owner_node="n4"), Verdict.ENOUGH),
        (replace(a_queue("owner's node is down", "123", online="12"), owner_node="n3"), Verdict.ADD),
        (replace(a_queue("owner's node is drained", "1235"), owner_node="n5"), Verdict.ENOUGH),
        (replace(a_queue("replicas come first", "12"), owner_node="n2"), Verdict.ADD),
        (replace(a_queue("stream", "123"), owner_node="n2", ref=ref("s", QueueKind.STREAM)), Verdict.ENOUGH),
    ],
    ids=lambda value: value.ref.name if isinstance(value, ReplicaQueue) else None,
)
def test_a_leader_is_left_where_it_is(queue: ReplicaQueue, verdict: Verdict) -> None:
    nodes = [ReplicaNode(name=name, is_running=name != "n3", in_maintenance=name == "n5") for name in NODES]
    if verdict is Verdict.ENOUGH:
        nodes[2] = replace(nodes[2], is_running=True)
    ages = Ages(short={queue.ref: FOR_LONG}, astray={queue.ref: FOR_LONG})
    seen = a_cluster(replace(queue, leader="n1"), nodes=nodes)
    assert the_row(seen, ReplicaLimits(move_leaders=True), ages=ages).verdict is verdict


def test_a_streams_member_is_not_forgotten_where_the_broker_can_not_do_so() -> None:
    queue = replace(a_queue("q", "129", online="12"), ref=ref("q", QueueKind.STREAM))
    ages = Ages(short={queue.ref: FOR_LONG}, absent={GONE: FOR_LONG})
    for can, verdict in ((True, Verdict.FORGET), (False, Verdict.ADD)):
        plan = replica_plan(a_cluster(queue), ReplicaPolicies(), ReplicaLimits(), ages=ages, forgets_absent_streams=can)
        assert plan.rows[0].verdict is verdict


def test_a_member_of_a_removed_node_that_still_answers_is_not_forgotten() -> None:
    row = the_row(a_cluster(a_queue("q", "1239", online="1239")))
    assert row.verdict is Verdict.ENOUGH


def test_a_member_on_a_node_that_is_down_is_kept_unless_told_otherwise() -> None:
    seen = a_cluster(a_queue("q", "1234", online="124"), down="3")
    assert the_row(seen).verdict is Verdict.ENOUGH
    row = the_row(seen, ReplicaLimits(forget_after_seconds=3_600))
    assert row.change is not None
    assert (row.change.kind, row.change.node) == (ChangeKind.FORGET, "n3")


def test_a_member_that_is_down_is_not_forgotten_before_it_is_replaced() -> None:
    seen = a_cluster(a_queue("q", "123", online="12"), down="3")
    assert the_row(seen, ReplicaLimits(forget_after_seconds=3_600)).verdict is Verdict.ADD


def test_a_member_that_is_down_is_forgotten_first_where_its_replacement_would_stop_publishing() -> None:
    seen = a_cluster(a_queue("q", "123", online="12", messages=1_000_000), down="3")
    assert the_row(seen).verdict is Verdict.STALL
    row = the_row(seen, ReplicaLimits(forget_after_seconds=3_600))
    assert row.verdict is Verdict.FORGET


def test_a_member_that_is_down_is_kept_where_nothing_can_replace_it() -> None:
    """Its copy is needed when its node returns: all three nodes have a member."""
    nodes = [ReplicaNode(name=name, is_running=name != "n3") for name in NODES[:3]]
    for messages in (0, 1_000_000):
        seen = a_cluster(a_queue("q", "123", online="12", messages=messages), nodes=nodes)
        row = the_row(seen, ReplicaLimits(forget_after_seconds=3_600))
        assert (row.verdict, row.change) == (Verdict.NO_NODE, None)


def test_without_a_majority_nothing_is_done() -> None:
    row = the_row(a_cluster(a_queue("q", "123", online="1"), down="23"))
    assert (row.verdict, row.change) == (Verdict.NO_MAJORITY, None)
    assert row.reason.startswith("1 of 3 members are online")


@pytest.mark.parametrize(("members", "stalls"), [("1", True), ("12", False), ("123", True), ("1234", False)])
def test_a_large_backlog_is_copied_without_leave_only_where_the_new_vote_is_not_needed(
    members: str, stalls: bool
) -> None:
    """Of three members one is down, of four none: a vote is needed if the majority grows beyond the online members."""
    queue = a_queue("q", members, online=members[:2], messages=10_001, asked=5)
    queue = replace(queue, online=queue.members) if len(members) == 4 else queue
    seen = a_cluster(queue, down="3" if len(members) == 3 else "")
    assert the_row(seen).verdict is (Verdict.STALL if stalls else Verdict.ADD)
    assert the_row(seen, ReplicaLimits(allow_stall=True)).verdict is Verdict.ADD
    small = replace(seen, queues=(replace(queue, messages=10_000),))
    assert the_row(small).verdict is Verdict.ADD


def test_a_backlog_of_unknown_size_is_taken_for_a_large_one() -> None:
    seen = a_cluster(replace(a_queue("q", "1"), messages=None))
    assert the_row(seen).verdict is Verdict.STALL
    assert "a backlog of unknown size" in the_row(seen).reason
    assert the_row(seen, ReplicaLimits(allow_stall=True)).verdict is Verdict.ADD


def test_a_broker_whose_members_join_without_a_vote_needs_no_leave() -> None:
    seen = a_cluster(a_queue("q", "1", messages=10**6))
    plan = replica_plan(
        seen,
        ReplicaPolicies(),
        ReplicaLimits(),
        ages=Ages(short={ref("q"): FOR_LONG}),
        voters_join_late=True,
    )
    assert plan.rows[0].verdict is Verdict.ADD


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (ReplicaNode(name="n4", is_running=False), "down"),
        (ReplicaNode(name="n4", is_cut_off=True), "cut off"),
        (ReplicaNode(name="n4", in_maintenance=True), "in maintenance"),
        (ReplicaNode(name="n4", has_alarm=True), "low on memory or disk"),
    ],
)
def test_a_node_that_is_not_well_gets_no_replica(state: ReplicaNode, said: str) -> None:
    nodes = [*(ReplicaNode(name=f"n{number}") for number in (1, 2)), ReplicaNode(name="n3", is_running=False), state]
    row = the_row(a_cluster(a_queue("q", "123", online="12"), nodes=nodes))
    assert (row.verdict, row.change) == (Verdict.NO_NODE, None)
    assert f"n4 is {said}" in row.reason


def test_a_member_that_is_cut_off_does_not_count_as_online() -> None:
    nodes = [ReplicaNode(name=name, is_cut_off=name == "n3") for name in NODES]
    row = the_row(a_cluster(a_queue("q", "123"), nodes=nodes))
    assert row.online == {"n1", "n2"}
    assert row.verdict is Verdict.ADD


def test_where_all_of_rabbitmq_was_partitioned_that_is_said() -> None:
    nodes = [ReplicaNode(name=name, is_cut_off=True) for name in NODES]
    row = the_row(a_cluster(a_queue("q", "12"), nodes=nodes))
    assert row.verdict is Verdict.NO_MAJORITY
    assert row.reason.endswith("RabbitMQ was partitioned and has not recovered; nodes cut off: n1, n2")


# ---------------------------------------------------------------- several queues


def test_changes_at_a_time_are_limited_overall_and_on_each_node() -> None:
    seen = a_cluster(*(a_queue(f"q{number}", "12") for number in range(9)))
    limits = ReplicaLimits(changes_max=5, changes_per_node_max=2)
    plan = planned(seen, limits)
    nodes = [change.node for change in plan.changes]
    assert len(nodes) == 5
    assert max(nodes.count(node) for node in NODES) == 2
    assert sum(row.verdict is Verdict.LIMITED for row in plan.rows) == 4


def test_what_is_under_way_counts_and_its_queue_is_left_alone() -> None:
    seen = a_cluster(a_queue("a", "12"), a_queue("b", "12"))
    (first,) = planned(seen, ReplicaLimits(changes_max=1)).changes
    assert first.queue == ref("a")
    again = planned(seen, ReplicaLimits(changes_max=1), busy=[first])
    assert [row.verdict for row in again.rows] == [Verdict.BUSY, Verdict.LIMITED]
    assert [change.queue for change in planned(seen, busy=[first]).changes] == [ref("b")]


def test_the_most_endangered_queue_comes_first() -> None:
    seen = a_cluster(a_queue("a", "124", asked=5), a_queue("b", "345", online="45"), down="3")
    assert [row.ref.name for row in planned(seen).rows] == ["b", "a"]
    assert planned(seen, ReplicaLimits(changes_max=1)).changes[0].queue == ref("b")


def test_the_counts_of_replicas_are_kept_even_within_one_plan() -> None:
    seen = a_cluster(*(a_queue(f"q{number}", "12") for number in range(6)))
    nodes = [change.node for change in planned(seen, ReplicaLimits(changes_max=6, changes_per_node_max=6)).changes]
    assert sorted(nodes) == ["n3", "n3", "n4", "n4", "n5", "n5"]


# ---------------------------------------------------------------- where the count comes from


def test_the_argument_counts_first_then_the_group_then_the_most_specific_policy_then_rabbitmqs_then_the_default() -> (
    None
):
    policies = ReplicaPolicies(
        policies=(ReplicaPolicy("*", 1), ReplicaPolicy("orders*", 5), ReplicaPolicy("orders.eu", 4)), default=2
    )
    broker = Asked(7, "RabbitMQ policy ha")
    bare = replace(a_queue("orders.us", "1"), asked=None)
    grouped = replace(bare, group_asked=Asked(0, "group orders/us"))
    assert policies.asked(replace(grouped, asked=Asked(9, "argument x"))) == Asked(9, "argument x")
    assert policies.asked(grouped) == Asked(0, "group orders/us")
    assert policies.asked(replace(bare, broker_asked=broker)) == Asked(5, "policy orders*")
    assert policies.asked(replace(bare, ref=ref("orders.eu"))) == Asked(4, "policy orders.eu")
    assert policies.asked(replace(bare, ref=ref("audit"))) == Asked(1, "policy *")
    only_default = ReplicaPolicies(default=2)
    assert only_default.asked(replace(bare, broker_asked=broker)) == broker
    assert only_default.asked(bare) == Asked(2, "default")


def test_of_policies_that_are_equally_specific_the_one_that_asks_for_more_counts() -> None:
    policies = (ReplicaPolicy("orders*", 3), ReplicaPolicy("*orders", 5), ReplicaPolicy("?rders*", 7))
    queue = replace(a_queue("orders", "1"), asked=None)
    for some in (policies, policies[::-1]):
        assert ReplicaPolicies(policies=some).asked(queue) == Asked(5, "policy *orders")


def test_a_groups_count_is_that_of_its_queues_and_of_no_other() -> None:
    groups = [
        GroupReplicas(
            Subscription(TopicName("orders"), GroupName("billing")), 5, [BrokerQueue("a"), BrokerQueue("dead")]
        ),
        GroupReplicas(Subscription(TopicName("orders"), GroupName("audit")), 1, [BrokerQueue("gone")]),
    ]
    seen = as_groups_ask(a_cluster(*(replace(a_queue(name, "123"), asked=None) for name in ("a", "b", "dead"))), groups)
    rows = {row.ref.name: (row.wanted, row.asked.source, row.verdict) for row in planned(seen).rows}
    assert rows == {
        "a": (5, "group orders/billing", Verdict.ADD),
        "b": (3, "default", Verdict.ENOUGH),
        "dead": (5, "group orders/billing", Verdict.ADD),
    }


# ---------------------------------------------------------------- placement


def test_replicas_are_spread_over_zones_then_to_the_fewest_replicas_then_to_the_least_pressure() -> None:
    members = [ReplicaNode(name="n1", zone="a"), ReplicaNode(name="n2", zone="b")]
    nodes = [
        ReplicaNode(name="same zone", zone="a"),
        ReplicaNode(name="full", zone="c", replicas=1, memory_share=0.9),
        ReplicaNode(name="roomy", zone="c", replicas=1, memory_share=0.1),
        ReplicaNode(name="many", zone="c", replicas=2),
    ]
    assert list(spread(a_queue("q", "12"), members, nodes)) == ["roomy", "full", "many", "same zone"]


def test_what_a_placement_says_is_taken_only_as_far_as_it_makes_sense() -> None:
    seen = a_cluster(a_queue("q", "123", online="12"), down="3")
    ages = Ages(short={ref("q"): FOR_LONG})

    def the_node(answer: Sequence[str]) -> str:
        plan = replica_plan(
            seen, ReplicaPolicies(), ReplicaLimits(), ages=ages, place=lambda queue, members, nodes: answer
        )
        return plan.changes[0].node

    assert the_node(["n5"]) == "n5"
    assert the_node(["n1", "n3", "nowhere", "n5"]) == "n5"
    assert the_node([]) == the_node(["n3"]) == "n4"


def test_a_placement_is_not_asked_where_there_is_no_room_anyway() -> None:
    asked = list[str]()

    def place(queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]) -> Sequence[str]:
        asked.append(queue.ref.name)
        return []

    seen = a_cluster(*(a_queue(f"q{number}", "12") for number in range(200)))
    ages = Ages(short={queue.ref: FOR_LONG for queue in seen.queues})
    plan = replica_plan(seen, ReplicaPolicies(), ReplicaLimits(changes_max=2), ages=ages, place=place)
    assert [change.queue.name for change in plan.changes] == asked == ["q0", "q1"]


# ---------------------------------------------------------------- any cluster


class World(NamedTuple):
    seen: Observation
    limits: ReplicaLimits


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Generate up to six nodes in any state, up to eight queues in any state, some with members on a node that is
    gone.
    """
    names = NODES[: draw(st.integers(1, 5))]
    nodes = tuple(
        ReplicaNode(
            name=name,
            is_running=draw(st.booleans()) or draw(st.booleans()),
            is_cut_off=draw(st.integers(0, 9)) == 0,
            in_maintenance=draw(st.integers(0, 9)) == 0,
            has_alarm=draw(st.integers(0, 9)) == 0,
            zone=draw(st.sampled_from([None, "a", "b"])),
            memory_share=draw(st.floats(0, 1)),
        )
        for name in names
    )
    running = {node.name for node in nodes if node.is_running}
    queues = tuple(
        ReplicaQueue(
            ref=ref(f"q{number}", draw(st.sampled_from(QueueKind))),
            members=(members := draw(st.frozensets(st.sampled_from([*names, GONE]), min_size=1))),
            online=draw(st.frozensets(st.sampled_from(sorted(members)))) & running,
            messages=draw(st.sampled_from([0, 10**6])),
            asked=Asked(draw(st.integers(0, 6)), "argument"),
        )
        for number in range(draw(st.integers(0, 8)))
    )
    limits = ReplicaLimits(
        changes_max=draw(st.integers(1, 5)),
        changes_per_node_max=draw(st.integers(1, 3)),
        forget_after_seconds=draw(st.sampled_from([None, 100.0])),
        allow_stall=draw(st.booleans()),
    )
    return World(Observation(nodes=nodes, queues=queues), limits)


def after(seen: Observation, changes: Sequence[Change]) -> Observation:
    """Return the cluster after the changes, once new members have caught up."""
    by_queue = {change.queue: change for change in changes}
    queues: list[ReplicaQueue] = []
    for queue in seen.queues:
        change = by_queue.get(queue.ref)
        if change is not None:
            one = frozenset({change.node})
            if change.kind is ChangeKind.ADD:
                queue = replace(queue, members=queue.members | one, online=queue.online | one)
            else:
                queue = replace(queue, members=queue.members - one, online=queue.online - one)
        queues.append(queue)
    return replace(seen, queues=tuple(queues))


@given(worlds())
def test_no_plan_has_two_changes_of_a_queue_or_more_changes_than_allowed(world: World) -> None:
    changes = planned(world.seen, world.limits).changes
    assert len({change.queue for change in changes}) == len(changes) <= world.limits.changes_max
    nodes = [change.node for change in changes]
    assert all(nodes.count(node) <= world.limits.changes_per_node_max for node in nodes)


@given(worlds())
def test_a_new_replica_only_comes_to_a_node_that_is_well_and_has_none(world: World) -> None:
    nodes = {node.name: node for node in world.seen.nodes}
    members = {queue.ref: queue.members for queue in world.seen.queues}
    for change in planned(world.seen, world.limits).changes:
        if change.kind is ChangeKind.ADD:
            assert nodes[change.node].unfit_reason is None
            assert change.node not in members[change.queue]
        else:
            assert change.node in members[change.queue]


@given(worlds())
def test_no_change_takes_a_queue_below_its_count_or_its_majority(world: World) -> None:
    before = {queue.ref: queue for queue in world.seen.queues}
    changes = planned(world.seen, world.limits).changes
    later = after(world.seen, changes)
    for queue in later.queues:
        if queue != before[queue.ref]:
            assert len(later.online(queue)) >= len(world.seen.online(before[queue.ref]))
            assert len(later.online(queue)) >= majority(len(queue.members))


@given(worlds())
def test_it_ends_and_takes_no_more_changes_than_are_missing(world: World) -> None:
    """Each round's changes are made, and the next plan is based on the result."""
    seen, made = world.seen, list[Change]()
    for _ in range(len(seen.queues) * 12 + 1):
        changes = planned(seen, world.limits).changes
        if not changes:
            break
        made += changes
        seen = after(seen, changes)
    else:
        raise AssertionError("it goes on and on")
    for queue in world.seen.queues:
        added = [change for change in made if change.queue == queue.ref and change.kind is ChangeKind.ADD]
        forgotten = [change.node for change in made if change.queue == queue.ref and change.kind is ChangeKind.FORGET]
        assert queue.asked is not None
        missing = max(0, min(queue.asked.replicas, len(seen.nodes)) - len(world.seen.online(queue)))
        assert len(added) <= missing
        assert len(set(forgotten)) == len(forgotten)
        assert not set(forgotten) & {change.node for change in added}
    for row in planned(seen, world.limits).rows:
        assert row.verdict in (Verdict.ENOUGH, Verdict.NO_NODE, Verdict.NO_MAJORITY, Verdict.STALL)
        if row.verdict is Verdict.ENOUGH:
            assert len(row.online) >= row.wanted


@given(worlds(), st.data())
def test_who_asks_about_some_queues_only_gets_changes_of_these(world: World, data: st.DataObject) -> None:
    refs = [queue.ref for queue in world.seen.queues]
    chosen = data.draw(st.sets(st.sampled_from(refs))) if refs else set[QueueRef]()
    ages = Ages(short=dict.fromkeys(refs, FOR_LONG), absent=dict.fromkeys([*NODES, GONE], FOR_LONG))
    plan = replica_plan(world.seen, ReplicaPolicies(), world.limits, ages=ages, only=chosen)
    assert {change.queue for change in plan.changes} <= chosen
    assert len(plan.rows) == len(refs)
