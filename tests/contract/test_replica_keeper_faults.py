"""The replica keeper with a lost lock, with incomplete or odd answers of RabbitMQ, and with failing tools.

``support.modern_replicas`` and shell scripts as tools give the answers; ``test_replicas_http`` has those of real
brokers.
"""

import asyncio
import copy
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
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
from popgate.domain.replica_plan import ReplicaLimits
from popgate.domain.replicas import Change, ChangeKind, QueueKind, QueueRef
from popgate.locks.grants import Grant
from popgate.replicas import changing
from popgate.replicas.changing import ChangeOutcome, Ending, carry_out
from popgate.replicas.events import KeeperRecord
from popgate.replicas.keeper import CAPABILITIES_SECONDS, ReplicaKeeper
from popgate.replicas.keeper_lock import KeeperAtWork
from popgate.replicas.options import KeeperOptions
from popgate.replicas.term import Term
from popgate.replicas.view import FRESH_SECONDS, CachedReplicaView
from popgate.runtime.clocks import ManualClock, SystemClock
from support.audit_client import until
from support.modern_replicas import ModernManagement, ModernQueue, ModernRabbit
from support.replicas import program

A, B, C, D = "rabbit@a", "rabbit@b", "rabbit@c", "rabbit@d"
ORDERS = QueueRef("/", "orders/eu", QueueKind.QUORUM)


@pytest.fixture
def rabbit() -> ModernRabbit:
    return ModernRabbit(queues={ORDERS.name: ModernQueue([A, B], [A, B])})


@pytest.fixture
def management(rabbit: ModernRabbit) -> Iterator[ModernManagement]:
    with ModernManagement(rabbit) as server:
        yield server


@pytest_asyncio.fixture
async def broker(management: ModernManagement) -> AsyncGenerator[RabbitReplicas]:
    made = RabbitReplicas("/", Management([management.url], "/"), None, {})
    yield made
    await made.stop()


async def proven() -> None:
    """The lock is held."""


# ---------------------------------------------------------------- the lock


class GrantThroughANodeThatIsCutOff:
    """A grant through a node that is cut off: the node confirms what it can answer by itself; no node grants the
    token again.
    """

    slot = Slot("replica-keeper", LockKind.MUTEX, 1)
    lost = asyncio.Event()
    reason = ""
    fencing_token = 7

    async def verify(self) -> None:
        pass

    async def renew(self) -> int | None:
        raise LockLost("the broker did not renew it")

    async def release(self) -> None:
        pass


_grant: type[Grant] = GrantThroughANodeThatIsCutOff


async def test_a_keeper_whose_node_is_cut_off_changes_nothing_though_that_node_says_yes(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    await broker.start()
    ended = asyncio.get_running_loop().create_future()

    def on_end(change: Change, outcome: ChangeOutcome) -> None:
        ended.set_result(outcome)

    grant = GrantThroughANodeThatIsCutOff()
    term = Term(grant, broker, KeeperOptions(), SystemClock(), KeeperRecord(), on_end)
    term.begin(Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B})))
    assert await ended == (Ending.DROPPED, "the broker did not renew it")
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


class HeldGrant:
    """A grant that is held until a test loses it."""

    slot = Slot("replica-keeper", LockKind.MUTEX, 1)
    fencing_token = 7

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.released = False

    async def verify(self) -> None:
        if self.lost.is_set():
            raise LockLost("it was handed on")

    async def renew(self) -> int | None:
        await self.verify()
        return self.fencing_token

    async def release(self) -> None:
        self.released = True


class OneGrant:
    """A lock that is granted once."""

    def __init__(self) -> None:
        self.grants = [HeldGrant()]
        self.grant = self.grants[0]

    async def acquire(self, wait_seconds: float) -> Grant | None:
        if self.grants:
            return self.grants.pop()
        await asyncio.Event().wait()
        return None

    async def holder(self) -> KeeperAtWork | None:
        return None


@asynccontextmanager
async def running(broker: RabbitReplicas, lock: OneGrant) -> AsyncGenerator[ReplicaKeeper]:
    """Run a keeper that looks ten times a second."""
    options = KeeperOptions(limits=ReplicaLimits(recovery_interval_seconds=0), check_interval_seconds=1)
    keeper = ReplicaKeeper(broker, lock, options, place=spread, clock=SystemClock(), chance=random.Random(1))
    task = asyncio.create_task(keeper.run())
    yield keeper
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize(("late", "members"), [(0, [A, B, C]), (2, [A, B, C]), (1_000, [A, B])])
async def test_applying_looks_again_if_a_list_is_older_than_the_last_change(
    broker: RabbitReplicas, rabbit: ModernRabbit, late: int, members: list[str]
) -> None:
    """It gives up if the lists stay old."""
    rabbit.queues[ORDERS.name] = ModernQueue([A], [A], late_lists=late)
    await broker.start()
    options = KeeperOptions(limits=ReplicaLimits(recovery_interval_seconds=0), check_interval_seconds=1)
    keeper = ReplicaKeeper(broker, OneGrant(), options, place=spread, clock=SystemClock(), chance=random.Random(1))
    async with asyncio.timeout(30):
        survey = await keeper.apply()
    assert sorted(rabbit.queues[ORDERS.name].members) == members
    (row,) = survey.plan.rows
    assert ("its members have been changed meanwhile" in row.reason) is (members == [A, B])


async def test_a_keeper_that_loses_its_lock_lets_go_of_what_is_under_way(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    rabbit.queues[ORDERS.name].behind[C] = 1
    rabbit.queues["second"] = ModernQueue([A, B, C], [A, B, C])
    lock = OneGrant()
    async with running(broker, lock) as keeper:
        await until(
            lambda: bool(keeper.under_way and rabbit.changes), timeout_seconds=20, what="the change to be under way"
        )
        rabbit.queues["second"] = ModernQueue([A], [A])
        lock.grant.lost.set()
        await until(lambda: lock.grant.released, timeout_seconds=20, what="the lock to be let go")
        assert not keeper.is_at_work
        assert keeper.under_way == []
        assert keeper.record.counts["failed", "add"] == 1
    assert rabbit.changes == [("POST", ORDERS.name, C)]


async def test_a_keeper_that_can_not_see_shows_nothing_of_what_it_saw_before(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    async with running(broker, OneGrant()) as keeper:
        await until(lambda: keeper.latest is not None, timeout_seconds=20, what="the keeper to look")
        rabbit.odd = {"queues": (500, None)}
        await until(lambda: keeper.latest is None, timeout_seconds=20, what="the keeper to notice")
        assert keeper.is_at_work
        rabbit.odd = {}
        await until(lambda: keeper.latest is not None, timeout_seconds=20, what="the keeper to look")
        assert keeper.record.counts["blind", ""] == 1


# ---------------------------------------------------------------- half and odd answers


ODD: Sequence[dict[str, tuple[int, Any]]] = [
    {"queues": (200, {"error": "odd"})},
    {"queues": (200, None)},
    {"queues": (500, [])},
    {"nodes": (200, [])},
    {"nodes": (200, [1, {"running": True}])},
    {"nodes": (200, {"name": A})},
    {"policies": (200, "odd")},
]


@pytest.mark.parametrize("odd", ODD)
async def test_an_answer_that_makes_no_sense_is_no_answer(
    broker: RabbitReplicas, rabbit: ModernRabbit, odd: dict[str, tuple[int, Any]]
) -> None:
    """Above all it is not considered a cluster without nodes, whose members would be forgotten."""
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


# ---------------------------------------------------------------- members that lag


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        (ModernQueue([A, B], [A, B], joining={B: 0}), f"{B} must catch up first"),
        (ModernQueue([A, B], [A, B], behind={B: 1_001}), f"{B} must catch up first"),
        (ModernQueue([A, B], [A]), "1 of 2 members answer"),
        (ModernQueue([A, B, D], [A, B, D]), f"its members have been changed meanwhile: {A}, {B}, {D}"),
    ],
)
async def test_an_addition_is_dropped_where_a_member_lags_or_is_lost_at_the_last_look(
    broker: RabbitReplicas, rabbit: ModernRabbit, queue: ModernQueue, reason: str
) -> None:
    await broker.start()
    rabbit.queues = {ORDERS.name: copy.deepcopy(queue)}
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B}))
    outcome = await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)
    assert outcome == (Ending.DROPPED, reason)
    assert rabbit.changes == []


async def test_a_member_that_does_not_catch_up_in_time_is_said(broker: RabbitReplicas, rabbit: ModernRabbit) -> None:
    await broker.start()
    rabbit.queues[ORDERS.name].behind[C] = 1
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="", members=frozenset({A, B}))
    outcome = await carry_out(change, broker, KeeperOptions(catch_up_seconds_max=0.1), SystemClock(), proven)
    assert outcome == (Ending.FAILED, f"{C} has not caught up within 0.1 s")


async def test_a_member_has_caught_up_where_it_has_what_the_leader_had_though_more_comes(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    await broker.start()
    rabbit.queues[ORDERS.name] = ModernQueue([A, B], [A, B], behind={C: 1}, growth=100)
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node=C, reason="short", members=frozenset({A, B}))
    outcome = await carry_out(change, broker, KeeperOptions(catch_up_seconds_max=5), SystemClock(), proven)
    assert outcome == (Ending.DONE, "short")


async def test_a_member_that_does_not_come_to_lead_in_time_is_said(
    management: ModernManagement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """RabbitMQ's tool also reports success if the member could not be reached."""
    monkeypatch.setattr(changing, "LEAD_SECONDS_MAX", 0.1)
    script = f"""case "$*" in *cluster_status*) echo '{{}}' ;; *) echo "$@" >> {tmp_path}/asked ;; esac"""
    broker = RabbitReplicas("/", Management([management.url], "/"), BrokerTools([program(tmp_path, "r", script)]), {})
    assert (await broker.start()).moves_leaders_by == "rabbitmq-queues"
    change = Change(kind=ChangeKind.LEAD, queue=ORDERS, node=B, reason="", members=frozenset({A, B}))
    outcome = await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)
    assert outcome == (Ending.FAILED, f"{B} is not its leader after 0.1 s")
    said = (tmp_path / "asked").read_text()
    assert said == "rabbitmq-queues --quiet transfer_leadership --vhost / -- orders/eu rabbit@b\n"
    await broker.stop()


async def test_who_answered_when_it_was_decided_and_does_not_now_stops_an_addition(
    broker: RabbitReplicas, rabbit: ModernRabbit
) -> None:
    """The new member's vote would be needed before it has copied anything."""
    await broker.start()
    rabbit.queues[ORDERS.name] = ModernQueue([A, B, C], [A, B])
    all_three = frozenset({A, B, C})
    change = Change(kind=ChangeKind.ADD, queue=ORDERS, node="rabbit@d", reason="", members=all_three, online=all_three)
    outcome = await carry_out(change, broker, KeeperOptions(), SystemClock(), proven)
    assert outcome == (Ending.DROPPED, f"{C} answered when the change was decided, and does not answer any more")
    assert rabbit.changes == []


# ---------------------------------------------------------------- what the broker can


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
    cached_view = CachedReplicaView(keeper_of(broker, clock), clock)
    assert len((await cached_view.view()).survey.seen.queues) == 1
    rabbit.queues["another"] = ModernQueue([A], [A])
    assert len((await cached_view.view()).survey.seen.queues) == 1, "so fresh"
    clock.advance(FRESH_SECONDS + 1)
    clock.jump_wall(-86_400)
    assert len((await cached_view.view()).survey.seen.queues) == 2
