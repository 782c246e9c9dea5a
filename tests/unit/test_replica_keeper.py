"""The parts of the replica keeper that decide when, and those that must bear what others get wrong."""

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.adapters.replicas.reading import drained_nodes, nodes_of_status, quorum_members, replica_queue
from popgate.adapters.replicas.tools import BrokerTools
from popgate.bootstrap.replicas import placement
from popgate.domain.errors import BrokerUnavailable, StartupError
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

QUEUE = ReplicaQueue(
    ref=QueueRef("/", "q", QueueKind.QUORUM),
    members=frozenset({"a", "b"}),
    online=frozenset({"a", "b"}),
    asked=Asked(3, "argument"),
)
NODES = tuple(ReplicaNode(name=name) for name in "abcd")


def refs(count: int) -> list[QueueRef]:
    return [QueueRef("/", f"q{number}", QueueKind.QUORUM) for number in range(count)]


# ---------------------------------------------------------------- a placement by somebody else


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


@pytest.mark.parametrize("place", [raises, exits, answers(None), answers("c"), answers([1]), takes_too_little])
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


def test_a_placement_that_is_not_there_is_said_at_the_start() -> None:
    assert placement("spread") is spread
    with pytest.raises(
        StartupError, match=r"no entry point 'by-rack' in the group popgate\.placement; there are spread"
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


def program(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


async def test_what_ssh_gives_to_a_shell_is_quoted_for_it(tmp_path: Path) -> None:
    """This ssh does what the real one does: it joins its words and has a shell read them."""
    ssh = program(tmp_path, "ssh", 'shift; exec sh -c "$*"')
    echo = program(tmp_path, "echo-words", 'printf "[%s]" "$@"')
    nasty = f"q; touch {tmp_path}/hurt $(touch {tmp_path}/hurt) 'x"
    said = await BrokerTools([f"{ssh} host"]).run(echo, "add_member", nasty, "a@b")
    assert said == f"[--quiet][add_member][{nasty}][a@b]"
    assert not (tmp_path / "hurt").exists()


async def test_the_next_way_is_tried_where_one_leads_nowhere(tmp_path: Path) -> None:
    down = program(tmp_path, "down", 'echo "Error: unable to perform an operation on node a" >&2; exit 69')
    works = program(tmp_path, "works", "echo '[1]'")
    assert await BrokerTools([str(tmp_path / "missing"), down, works]).run_json("rabbitmqctl", "x") == [1]
    with pytest.raises(BrokerUnavailable, match="unable to perform") as raised:
        await BrokerTools([str(tmp_path / "missing"), down]).run("rabbitmqctl", "x")
    assert "can't run" in raised.value.detail


async def test_what_the_node_refuses_is_not_asked_of_another(tmp_path: Path) -> None:
    refuses = program(tmp_path, "refuses", "echo 'Error:' >&2; echo node_not_running >&2; exit 69")
    works = program(tmp_path, "works", f"touch {tmp_path}/asked")
    with pytest.raises(ReplicaRefused, match="rabbitmq-queues add_member: node_not_running"):
        await BrokerTools([refuses, works]).run("rabbitmq-queues", "add_member", "q", "a")
    assert not (tmp_path / "asked").exists()
