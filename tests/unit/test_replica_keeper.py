"""The timing decisions of the replica keeper, and its handling of others' errors."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.adapters.replicas.reading import (
    drained_nodes,
    nodes_of_status,
    owner_nodes,
    quorum_members,
    replica_queue,
)
from popgate.adapters.replicas.tools import TOOLS_AT_ONCE_MAX, BrokerTools
from popgate.bootstrap.replicas import placement
from popgate.domain.errors import BrokerUnavailable, LockLost, StartupError
from popgate.domain.replica_placement import spread
from popgate.domain.replica_plan import Ages as PlanAges
from popgate.domain.replica_plan import ReplicaLimits, ReplicaPlan, replica_plan
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import (
    Asked,
    Observation,
    QueueKind,
    QueueRef,
    ReplicaNode,
    ReplicaQueue,
)
from popgate.ports.replicas import ReplicaRefused
from popgate.replicas import placing
from popgate.replicas.ages import AgeBook
from popgate.replicas.placing import GuardedPlacement
from popgate.replicas.schedule import CheckSchedule
from support.replicas import program

QUEUE = ReplicaQueue(
    ref=QueueRef("/", "q", QueueKind.QUORUM),
    members=frozenset({"a", "b"}),
    online=frozenset({"a", "b"}),
    asked=Asked(3, "argument"),
)
NODES = tuple(ReplicaNode(name=name) for name in "abcd")


def refs(count: int) -> list[QueueRef]:
    return [QueueRef("/", f"q{number}", QueueKind.QUORUM) for number in range(count)]


# ---------------------------------------------------------------- a custom placement


def planned_by(place: Any) -> tuple[ReplicaPlan, GuardedPlacement]:
    guarded = GuardedPlacement(place, "theirs")
    seen = Observation(nodes=NODES, queues=(QUEUE,))
    limits = ReplicaLimits(recovery_interval_seconds=0)
    return replica_plan(seen, ReplicaPolicies(), limits, ages=PlanAges(), place=guarded), guarded


def answers(what: object) -> Any:
    def place(queue: object, members: object, nodes: object) -> object:
        return what

    return place


def test_a_placement_that_works_decides() -> None:
    plan, guarded = planned_by(answers(["d", "c"]))
    assert [change.node for change in plan.changes] == ["d"]
    assert guarded.failures == 0


def raises(queue: object, members: object, nodes: object) -> Sequence[str]:
    raise LookupError("no such rack")


def exits(queue: object, members: object, nodes: object) -> Sequence[str]:
    raise SystemExit(1)


def takes_too_little(queue: object) -> Sequence[str]:
    return []


class UnspeakableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


def raises_what_has_no_words(queue: object, members: object, nodes: object) -> Sequence[str]:
    raise UnspeakableError


@pytest.mark.parametrize(
    "place",
    [raises, exits, answers(None), answers("c"), answers([1]), takes_too_little, raises_what_has_no_words],
)
def test_a_placement_that_fails_is_stood_in_for(place: Any) -> None:
    plan, guarded = planned_by(place)
    assert [change.node for change in plan.changes] == ["c"]
    assert guarded.failures == 1


def test_a_placement_that_does_not_end_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "ANSWER_SECONDS", 0.05)
    asked, free = list[int](), threading.Event()

    def hangs(queue: object, members: object, nodes: object) -> Sequence[str]:
        asked.append(1)
        free.wait()
        return []

    guarded = GuardedPlacement(hangs, "theirs")
    began = time.monotonic()
    given = [guarded(QUEUE, NODES[:2], NODES[2:]) for _ in range(100)]
    assert time.monotonic() - began < 1.0
    assert given == [list(spread(QUEUE, NODES[:2], NODES[2:]))] * 100
    assert (len(asked), guarded.failures) == (1, 1)
    free.set()


def test_an_answer_that_does_not_end_is_taken_as_far_as_it_is_needed() -> None:
    plan, guarded = planned_by(answers(itertools.cycle(["nowhere", "d"])))
    assert [change.node for change in plan.changes] == ["d"]
    assert guarded.failures == 0


def test_a_placement_that_is_slow_does_not_hold_up_the_look_at_hundreds_of_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "THINKING_SECONDS_MAX", 0.2)
    asked = list[int]()

    def thinks(queue: object, members: object, nodes: object) -> Sequence[str]:
        asked.append(1)
        threading.Event().wait(0.05)
        return ["d"]

    guarded = GuardedPlacement(thinks, "theirs")
    began = time.monotonic()
    given = [guarded(QUEUE, NODES[:2], NODES[2:]) for _ in range(300)]
    assert time.monotonic() - began < 5.0
    assert 1 <= len(asked) <= 10
    assert given[0] == ["d"]
    assert given[-1] == list(spread(QUEUE, NODES[:2], NODES[2:]))


def test_a_placement_that_is_not_there_is_said_at_the_start() -> None:
    assert placement("spread") is spread
    with pytest.raises(
        StartupError, match=r"no entry point 'by-rack' in the group popgate\.placement; choose one of spread"
    ):
        placement("by-rack")


# ---------------------------------------------------------------- when


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_each_queue_is_due_once_in_an_interval_and_never_all_at_once(seed: int, count: int) -> None:
    schedule, queues = CheckSchedule(30.0, random.Random(seed)), refs(count)
    schedule.know(0.0, queues)
    first = [schedule.due(now) for now in range(31)]
    assert set().union(*first) == set(queues)
    if count > 100:
        assert max(len(due) for due in first) < count / 4
    later = [schedule.due(now) for now in range(31, 31 + 37)]
    assert set().union(*later) == set(queues)


def test_a_queue_for_which_there_was_no_room_comes_again_soon() -> None:
    schedule, (queue,) = CheckSchedule(30.0, random.Random(1)), refs(1)
    schedule.know(0.0, [queue])
    assert schedule.due(30.0) == {queue}
    schedule.soon(30.0, queue)
    assert schedule.seconds_to_next(30.0) < 3.0
    schedule.know(31.0, [])
    schedule.soon(31.0, queue)
    assert schedule.due(100.0) == set()


def test_a_queue_that_is_to_be_looked_at_soon_is_looked_at_in_its_turn_where_that_is_sooner() -> None:
    schedule, (queue,) = CheckSchedule(30.0, random.Random(1)), refs(1)
    schedule.know(0.0, [queue])
    just_before = schedule.seconds_to_next(0.0) - 0.01
    schedule.soon(just_before, queue)
    assert schedule.due(just_before + 0.02) == {queue}


def test_what_comes_and_goes_is_not_old_and_neither_is_what_was_not_looked_at() -> None:
    book = AgeBook[str](gap_seconds_max=60.0)
    assert book.note(100.0, {"a", "b"}) == {"a": 0.0, "b": 0.0}
    assert book.note(130.0, {"a"}) == {"a": 30.0}
    assert book.note(140.0, {"a", "b"}) == {"a": 40.0, "b": 0.0}
    assert book.note(201.0, {"a"}) == {"a": 0.0}


# ---------------------------------------------------------------- RabbitMQ's answers


def test_nodes_in_maintenance_are_read_through_the_colours_of_3_10() -> None:
    said = {"a": "not under maintenance", "b": "\x1b[35mmarked for maintenance\x1b[0m", "c": "unknown"}
    assert drained_nodes({"maintenance_status": said}) == {"b"}
    lost = {"a": "not under maintenance", "b": "\ub100[35mmarked for maintenance\ub100[0m"}  # as 3.10.8 prints JSON
    assert drained_nodes({"maintenance_status": lost}) == {"b"}


def test_nodes_are_read_from_the_status_of_the_cluster() -> None:
    nodes = nodes_of_status(
        {
            "disk_nodes": ["a", "b", "c"],
            "running_nodes": ["a", "b"],
            "partitions": {"b": ["c"]},
            "alarms": [{"resource": "memory", "node": "a"}],
        },
        {"a": "east"},
    )
    assert [(node.name, node.unfit_reason, node.zone) for node in nodes] == [
        ("a", "low on memory or disk", "east"),
        ("b", "cut off", None),
        ("c", "down", None),
    ]


def test_an_alarm_is_of_the_node_that_it_names_and_of_none_whose_name_begins_alike() -> None:
    alarms = [{"type": "resource_limit", "resource": "memory", "node": "rabbit@n10"}, "odd", {"node": ["odd"]}]
    status = {"running_nodes": ["rabbit@n1", "rabbit@n10", 3], "alarms": alarms, "partitions": "odd"}
    assert [(node.name, node.unfit_reason) for node in nodes_of_status(status, {})] == [
        ("rabbit@n1", None),
        ("rabbit@n10", "low on memory or disk"),
    ]


def test_a_backlog_that_is_not_told_is_not_taken_for_none() -> None:
    queue = replica_queue(QUEUE.ref, {"members": ["a"], "online": ["a"]})
    assert queue is not None
    assert queue.messages is None


def test_the_argument_is_read_as_the_tools_tell_it_and_what_is_no_number_is_none() -> None:
    def asked(arguments: object) -> Asked | None:
        row = {"members": ["a"], "online": ["a", "z"], "arguments": arguments}
        queue = replica_queue(QUEUE.ref, row)
        assert queue is not None
        assert queue.online == {"a"}
        return queue.asked

    assert asked([["x-queue-type", "longstr", "quorum"], ["x-popgate-min-replicas", "long", 5]]) == Asked(
        5, "argument x-popgate-min-replicas"
    )
    assert asked({"x-quorum-target-group-size": 3, "x-popgate-min-replicas": "many"}) == Asked(
        3, "argument x-quorum-target-group-size"
    )
    assert asked({}) is asked(None) is asked("odd") is None
    assert replica_queue(QUEUE.ref, {"name": "q"}) is None


def test_a_queue_has_an_owners_node_where_its_active_consumers_are_on_one() -> None:
    def row(queue: str, node: object, *, active: bool = True) -> dict[str, Any]:
        return {"queue": {"name": queue, "vhost": "/"}, "active": active, "channel_details": {"node": node}}

    rows = [row("q", "a"), row("q", "b", active=False), row("both", "a"), row("both", "b"), row("odd", 7), {}]
    assert owner_nodes([*rows, {"queue": "odd", "active": True}, row("idle", "a", active=False)]) == {"q": "a"}


def test_members_are_read_as_3_10_and_as_4_tell_them() -> None:
    old = quorum_members(
        [
            {"Node Name": "a", "Raft State": "leader", "Log Index": 7, "Commit Index": 7},
            {"Node Name": "b", "Raft State": ["nodedown", "b"], "Log Index": "", "Commit Index": ""},
        ]
    )
    assert [(state.is_online, state.is_leader, state.position) for state in old] == [
        (True, True, 7),
        (False, False, None),
    ]
    new = quorum_members(
        [
            {"Node Name": "a", "Raft State": "follower", "Membership": "promotable", "Last Log Index": 7},
            {"Node Name": "b", "Raft State": "noproc", "Membership": "unknown"},
        ]
    )
    assert [(state.is_online, state.is_voter) for state in new] == [(True, False), (False, True)]


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("way", ["{ssh} host", "env A=1 {ssh} host", "{ssh} bastion {ssh} host"])
async def test_what_ssh_gives_to_a_shell_is_quoted_for_it(tmp_path: Path, way: str) -> None:
    """This ssh does what the real one does: it joins its words and has a shell read them."""
    ssh = program(tmp_path, "ssh", 'shift; exec sh -c "$*"')
    echo = program(tmp_path, "echo-words", 'printf "[%s]" "$@"')
    nasty = f"q; touch {tmp_path}/hurt $(touch {tmp_path}/hurt) 'x"
    said = await BrokerTools([way.format(ssh=ssh)]).run(echo, "add_member", nasty, "a@b")
    assert said.decode() == f"[--quiet][add_member][{nasty}][a@b]"
    assert not (tmp_path / "hurt").exists()


async def test_tools_read_and_write_utf_8_in_any_locale_or_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    tools = BrokerTools([""])
    told = program(tmp_path, "told", r"""printf '["%s %s"]' "$LC_ALL" "$4" """)
    assert await tools.run_json(told, "ü") == ["C.UTF-8 ü"]
    latin = program(tmp_path, "latin", r"""printf '["\374"]' """)
    with pytest.raises(BrokerUnavailable, match=r"did not answer in JSON and UTF-8 .*LC_ALL"):
        await tools.run_json(latin, "list_queues")


async def test_a_tool_gets_no_credential_of_popgate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ssh`` and ``kubectl`` may pass variables on to other machines."""
    for name in ("SECRET", "AMQP_URL", "TOKEN", "PORT"):
        monkeypatch.setenv(f"POPGATE_{name}", "hunter2")
    monkeypatch.setenv("RABBITMQ_NODENAME", "rabbit@here")
    shows = program(tmp_path, "shows", "env")
    said = (await BrokerTools([""]).run(shows)).decode()
    assert "RABBITMQ_NODENAME=rabbit@here" in said
    assert "PATH=" in said
    assert "POPGATE_" not in said


async def test_the_next_way_is_tried_where_one_leads_nowhere(tmp_path: Path) -> None:
    down = program(tmp_path, "down", 'echo "Error: unable to perform an operation on node a" >&2; exit 69')
    works = program(tmp_path, "works", "echo '[1]'")
    assert await BrokerTools([str(tmp_path / "missing"), down, works]).run_json("rabbitmqctl", "x") == [1]
    with pytest.raises(BrokerUnavailable, match="unable to perform") as raised:
        await BrokerTools([str(tmp_path / "missing"), f"{down} --token=hunter2"]).run("rabbitmqctl", "x")
    assert "can't run" in raised.value.detail
    assert "rabbitmqctl ended with 69" in raised.value.detail
    assert "hunter2" not in raised.value.detail, "callers of the interface read this"


async def test_what_the_node_refuses_is_not_asked_of_another(tmp_path: Path) -> None:
    refuses = program(tmp_path, "refuses", "echo 'Error:' >&2; echo node_not_running >&2; exit 69")
    works = program(tmp_path, "works", f"touch {tmp_path}/asked")
    with pytest.raises(ReplicaRefused, match="rabbitmq-queues add_member: node_not_running"):
        await BrokerTools([refuses, works]).run("rabbitmq-queues", "add_member", "q", "a")
    assert not (tmp_path / "asked").exists()


async def test_the_lock_is_proven_anew_before_each_way_is_tried(tmp_path: Path) -> None:
    """The first way may have hung for a minute, in which another keeper got the lock."""
    down = program(tmp_path, "down", 'echo "Error: unable to perform an operation on node a" >&2; exit 69')
    works = program(tmp_path, "works", f"touch {tmp_path}/asked")
    proofs = list[int]()

    async def prove() -> None:
        proofs.append(1)
        if len(proofs) > 1:
            raise LockLost("it was handed on")

    with pytest.raises(LockLost):
        await BrokerTools([down, works]).run("rabbitmq-queues", "add_member", prove=prove)
    assert not (tmp_path / "asked").exists()


async def test_who_stood_in_line_for_a_tool_proves_the_lock_when_its_turn_has_come(tmp_path: Path) -> None:
    waits = program(tmp_path, "waits", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    tools, proofs = BrokerTools([waits]), list[int]()

    async def prove() -> None:
        proofs.append(1)

    before = [asyncio.ensure_future(tools.run("rabbitmqctl", "x")) for _ in range(TOOLS_AT_ONCE_MAX)]
    change = asyncio.ensure_future(tools.run("rabbitmq-queues", "add_member", prove=prove))
    for _ in range(10):
        await asyncio.sleep(0)
    assert proofs == []
    (tmp_path / "go").touch()
    await asyncio.gather(*before, change)
    assert proofs == [1]
