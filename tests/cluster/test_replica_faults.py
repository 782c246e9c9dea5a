"""The replica keeper on five RabbitMQ nodes that are lost, cut off and brought back, and with keepers that die.

The scenarios of RabbitMQ's design of continuously maintained minimum replica counts (rabbitmq-server issue 7209), and
some more. After each of them, every queue that can have its minimum has it, the keeper's own changes have cost no queue
its majority, and publishing stalled for a second at most. Five nodes take a while: only with --full. With -s a table at
the end shows how long publishing and repairs took.
"""

import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.processes import ServerFailedError, wait_until
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import RabbitRelease
from support.replicas import (
    KeeperProcess,
    Publisher,
    declare,
    keeper_environment,
    replicas_of,
    wait_for_replicas,
)

STALL_SECONDS_MAX = 1.0
REPAIR_SECONDS = 240
MANY = 200
CHANGES_MAX, CHANGES_PER_NODE_MAX = 4, 2

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease, full_run: bool
) -> Iterator[RabbitCluster]:
    if not full_run:
        pytest.skip("five RabbitMQ nodes: with --full only")
    settings = RabbitSettings(net_tick_seconds=8, net_setup_seconds=2)
    folder = tmp_path_factory.mktemp("replicas")
    with RabbitCluster(folder, release=rabbitmq_release, size=5, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: RabbitCluster) -> Sequence[RabbitNode]:
    return cluster.nodes


@dataclass(kw_only=True)
class Figures:
    """The times of a scenario. `repair_seconds`: from the loss, or without one from the first keeper's start, until
    all queues had their wanted replicas; None if the scenario waits for no repair.
    """

    scenario: str
    stall_seconds: float | None = None
    repair_seconds: float | None = None
    changes: int = 0
    notes: list[str] = field(default_factory=list[str])


@dataclass(kw_only=True)
class Scene:
    """A virtual host; `at` is the node that is never lost."""

    cluster: RabbitCluster
    vhost: str
    folder: Path
    at: RabbitNode
    figures: Figures
    keepers: list[KeeperProcess] = field(default_factory=list[KeeperProcess])
    began: float | None = None

    def keeper(self, *flags: str, name: str = "keeper", by: Sequence[RabbitNode] | None = None) -> KeeperProcess:
        environment = keeper_environment(by or self.cluster.nodes, self.vhost)
        self.began = self.began or time.monotonic()
        self.keepers.append(KeeperProcess(self.folder / name, environment, *flags, name=name))
        return self.keepers[-1]

    def lose(self, *nodes: RabbitNode) -> None:
        for node in nodes:
            node.kill()
        self.began = time.monotonic()

    def wait_repaired(self, queues: Sequence[str], *, timeout_seconds: float = REPAIR_SECONDS) -> None:
        """Wait until each queue has three replicas. The first such time after a loss is recorded."""
        wait_for_replicas(self.at, self.vhost, queues, 3, timeout_seconds=timeout_seconds)
        if self.figures.repair_seconds is None and self.began is not None:
            self.figures.repair_seconds = time.monotonic() - self.began

    def tell(self, note: str) -> None:
        self.figures.notes.append(note)

    def queues(self, count: int, members: Sequence[Sequence[int]]) -> list[str]:
        """Declare that many queues, on nodes by their numbers (from 1), in turn."""
        names = [f"q{number:03}" for number in range(count)]
        for at, name in enumerate(names):
            own = [self.cluster.nodes[number - 1] for number in members[at % len(members)]]
            declare(own[0], self.vhost, name, own)
        return names

    def whole(self) -> None:
        for node in self.cluster.nodes:
            node.resume()
            try:
                node.start()
            except ServerFailedError:  # a test that failed half way has left it removed from the cluster
                shutil.rmtree(node.folder / "mnesia")
                node.start()
        self.cluster.wait_whole()


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[list[Figures]]:
    """The figures of all scenarios, printed at the end (with -s: pytest captures it otherwise)."""
    figures: list[Figures] = []
    yield figures
    terminal: pytest.TerminalReporter | None = request.config.pluginmanager.get_plugin("terminalreporter")
    if figures and terminal is not None:
        terminal.write_line(f"\n\n{table(figures)}")


def table(figures: Sequence[Figures]) -> str:
    rows = [("LONGEST PUBLISH", "REPAIRED AFTER", "CHANGES", "SCENARIO", "ALSO")]
    for one in figures:
        stall = "-" if one.stall_seconds is None else f"{one.stall_seconds:.2f} s"
        repair = "-" if one.repair_seconds is None else f"{one.repair_seconds:.0f} s"
        scenario = one.scenario.removeprefix("test_").replace("_", " ")
        rows.append((stall, repair, str(one.changes), scenario, "; ".join(one.notes)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@pytest.fixture
def scene(
    cluster: RabbitCluster, tmp_path: Path, request: pytest.FixtureRequest, told: list[Figures]
) -> Iterator[Scene]:
    name = str(request.node.name)
    vhost = name[:40]
    cluster.nodes[0].add_vhost(vhost)
    made = Scene(cluster=cluster, vhost=vhost, folder=tmp_path, at=cluster.nodes[0], figures=Figures(scenario=name))
    yield made
    made.figures.changes = sum(len(keeper.changes("done")) for keeper in made.keepers)
    told.append(made.figures)
    made.whole()
    cluster.nodes[0].delete_vhost(vhost)


@contextmanager
def published_to(scene: Scene, queues: Sequence[str]) -> Generator[Publisher]:
    """Run a publisher; no publish may fail, and none may take too long since the last ``forget``."""
    publisher = Publisher(scene.at, scene.vhost, queues)
    publisher.start()
    wait_until(lambda: publisher.confirmed > len(queues), timeout_seconds=30, what="the publisher to be at work")
    try:
        yield publisher
        longest = publisher.longest_seconds()
    finally:
        publisher.end()
    scene.figures.stall_seconds = longest
    scene.tell(f"{publisher.confirmed} messages published")
    assert publisher.failures == []
    assert longest <= STALL_SECONDS_MAX


def settled(publisher: Publisher) -> None:
    """Wait until leaders are elected, so that later delays are due to the keeper."""

    def quick() -> bool:
        publisher.forget()
        before = publisher.confirmed
        time.sleep(1)
        return publisher.longest_seconds() < STALL_SECONDS_MAX / 2 and publisher.confirmed > before + 5

    wait_until(quick, timeout_seconds=60, what="every queue to have a leader again")
    publisher.forget()


def has_khepri(node: RabbitNode) -> bool:
    return node.release.version >= (4,)


def assert_well(*keepers: KeeperProcess) -> None:
    for keeper in keepers:
        assert "Traceback" not in keeper.output
        assert keeper.changes("failed") == []


# ---------------------------------------------------------------- the scenarios


def test_a_node_that_is_lost_for_good_is_replaced(scene: Scene) -> None:
    *_, lost = scene.cluster.nodes
    queues = scene.queues(6, [(1, 2, 5), (5, 3, 1), (3, 4, 5)])
    declare(scene.at, scene.vhost, "stream", [scene.at, scene.cluster.nodes[1], lost], kind="stream")
    with scene.keeper("--recovery-interval-seconds", "5") as keeper, published_to(scene, queues) as publisher:
        scene.lose(lost)
        settled(publisher)
        scene.wait_repaired([*queues, "stream"])
        # As forget_cluster_node, which would also remove the replicas: here the keeper must do it.
        database = "rabbit_db_cluster:forget_member" if has_khepri(scene.at) else "rabbit_mnesia:forget_cluster_node"
        scene.at.ctl("eval", f"ok = {database}('{lost.name}', false).")
        wait_until(
            lambda: all(lost.name not in replicas_of(scene.at, scene.vhost)[name][0] for name in queues),
            timeout_seconds=REPAIR_SECONDS,
            what="the removed node to be forgotten everywhere",
        )
        shutil.rmtree(lost.folder / "mnesia")
        lost.start()
        scene.cluster.wait_whole()
        scene.wait_repaired([*queues, "stream"])
        assert any("what='forget'" in line for line in keeper.changes("done"))
        assert_well(keeper)


def test_a_human_who_adds_replicas_at_the_same_moment_is_not_in_the_way(scene: Scene) -> None:
    *_, lost = scene.cluster.nodes
    queues = scene.queues(6, [(1, 2, 5)])
    with scene.keeper("--recovery-interval-seconds", "5") as keeper, published_to(scene, queues) as publisher:
        scene.lose(lost)
        settled(publisher)
        wait_until(lambda: bool(keeper.changes()), timeout_seconds=60, what="the keeper to begin")
        for queue in queues:
            try:
                scene.at.ctl("add_member", "--vhost", scene.vhost, queue, "n3@localhost", tool="rabbitmq-queues")
            except ServerFailedError as error:  # RabbitMQ makes one change of a queue at a time
                scene.tell(f"refused: {str(error).strip().splitlines()[-1]}")
        scene.wait_repaired(queues)
        wait_until(
            lambda: len(keeper.changes()) == sum(len(keeper.changes(end)) for end in ("done", "dropped", "failed")),
            timeout_seconds=60,
            what="the keeper's changes to end",
        )
        members = [len(members) for name, (members, _) in replicas_of(scene.at, scene.vhost).items() if name in queues]
        assert max(members) <= 5, "one lost, and one more than wanted at the most"
        scene.tell(f"members {sorted(members)}, {len(keeper.changes('dropped'))} changes dropped")
        assert "Traceback" not in keeper.output


def test_a_node_that_comes_back_before_the_interval_ends_changes_nothing(scene: Scene) -> None:
    *_, lost = scene.cluster.nodes
    queues = scene.queues(4, [(1, 2, 5)])
    before = replicas_of(scene.at, scene.vhost)
    with scene.keeper("--recovery-interval-seconds", "60") as keeper, published_to(scene, queues) as publisher:
        wait_until(lambda: keeper.is_at_work, timeout_seconds=20, what="the keeper to be at work")
        scene.lose(lost)
        settled(publisher)
        wait_until(lambda: "what='waiting'" in keeper.output, timeout_seconds=30, what="the keeper to notice")
        lost.start()
        scene.wait_repaired(queues)
        wait_until(
            lambda: keeper.output.count("what='enough'") >= len(queues), timeout_seconds=60, what="the keeper to see it"
        )
        assert keeper.changes() == []
        after = replicas_of(scene.at, scene.vhost)
        assert {name: after[name][0] for name in queues} == {name: before[name][0] for name in queues}
        assert_well(keeper)


# ---------------------------------------------------------------- and more


def test_with_two_nodes_lost_what_has_a_majority_is_repaired_and_the_rest_when_one_is_back(scene: Scene) -> None:
    fourth, fifth = scene.cluster.nodes[3:]
    untouched, repaired, helpless = scene.queues(3, [(1, 2, 3), (1, 2, 4), (3, 4, 5)])
    with (
        scene.keeper("--recovery-interval-seconds", "5") as keeper,
        published_to(scene, [untouched, repaired]) as publisher,
    ):
        scene.lose(fourth, fifth)
        settled(publisher)
        scene.wait_repaired([untouched, repaired])
        assert f"queue={helpless!r}" not in "".join(keeper.changes())
        assert "what='no_majority'" in keeper.output
        fourth.start()
        scene.wait_repaired([helpless])
        fifth.start()
        assert_well(keeper)


def test_a_keeper_that_is_killed_half_way_is_followed_by_another(scene: Scene) -> None:
    queues = scene.queues(20, [(1, 2), (2, 3), (3, 4)])
    flags = ("--recovery-interval-seconds", "2")
    with ExitStack() as stack, published_to(scene, queues):
        keepers = [stack.enter_context(scene.keeper(*flags, name=name)) for name in ("one", "two")]
        wait_until(
            lambda: any(len(keeper.changes("done")) >= 4 for keeper in keepers),
            timeout_seconds=120,
            what="some changes",
        )
        at_work, other = sorted(keepers, key=lambda keeper: not keeper.is_at_work)
        at_work.kill()
        scene.wait_repaired(queues)
        members = Counter(len(replicas_of(scene.at, scene.vhost)[name][0]) for name in queues)
        scene.tell(f"{len(at_work.changes('done'))} changes before, {len(other.changes('done'))} after")
        assert members == {3: 20}
        assert_well(other)


def test_a_keeper_that_is_cut_off_is_followed_by_another_and_does_nothing(scene: Scene) -> None:
    """One keeper can reach only the fifth node, which is cut off from all others: a real partition."""
    *others, fifth = scene.cluster.nodes
    queues = scene.queues(6, [(1, 2, 5)])
    flags = ("--recovery-interval-seconds", "5")
    with scene.keeper(*flags, name="alone", by=[fifth]) as alone:
        wait_until(lambda: alone.is_at_work, timeout_seconds=20, what="the first keeper to be at work")
        with scene.keeper(*flags, name="other", by=others) as other, published_to(scene, queues) as publisher:
            with cut_off(fifth, others):
                settled(publisher)
                wait_until(lambda: other.is_at_work, timeout_seconds=60, what="the other keeper to take over")
                scene.wait_repaired(queues)
                assert alone.changes() == []
                wait_until(lambda: not alone.is_at_work, timeout_seconds=60, what="the first keeper to learn it")
                publisher.forget()
            scene.cluster.wait_whole()
            assert alone.changes() == []
            assert_well(alone, other)


def test_a_keeper_that_was_stopped_does_nothing_when_it_wakes_up(scene: Scene) -> None:
    queues = scene.queues(6, [(1, 2)])
    flags = ("--recovery-interval-seconds", "4")
    with ExitStack() as stack, published_to(scene, queues):
        asleep = stack.enter_context(scene.keeper(*flags, name="asleep"))
        wait_until(
            lambda: "what='waiting'" in asleep.output, timeout_seconds=30, what="the first to see what is missing"
        )
        asleep.pause()
        other = stack.enter_context(scene.keeper(*flags, name="other"))
        scene.wait_repaired(queues)
        asleep.resume()
        wait_until(lambda: not asleep.is_at_work, timeout_seconds=60, what="the first keeper to learn it")
        members = Counter(len(replicas_of(scene.at, scene.vhost)[name][0]) for name in queues)
        assert members == {3: 6}
        scene.tell(f"{len(asleep.changes())} changes begun by the one that slept")
        assert "Traceback" not in asleep.output
        assert_well(other)


def test_two_hundred_queues_are_repaired_without_a_storm(scene: Scene) -> None:
    *_, lost = scene.cluster.nodes
    queues = [f"q{number:03}" for number in range(MANY)]
    for queue in queues:
        declare(lost, scene.vhost, queue, [lost], size=3)
    limits = ("--changes-max", str(CHANGES_MAX), "--changes-per-node-max", str(CHANGES_PER_NODE_MAX))
    with (
        scene.keeper("--recovery-interval-seconds", "10", *limits) as keeper,
        published_to(scene, queues[::10]) as publisher,
    ):
        scene.lose(lost)
        settled(publisher)
        scene.wait_repaired(queues, timeout_seconds=1_200)
        most, most_on_a_node = _under_way(keeper)
        scene.tell(f"{MANY} queues; at most {most} changes at a time, {most_on_a_node} on a node")
        assert most <= CHANGES_MAX
        assert most_on_a_node <= CHANGES_PER_NODE_MAX
        on_nodes = Counter(
            member for members, _ in replicas_of(scene.at, scene.vhost).values() for member in members - {lost.name}
        )
        scene.tell(f"replicas by node {sorted(on_nodes.values())}")
        assert max(on_nodes.values()) - min(on_nodes.values()) <= MANY * 0.1
        assert_well(keeper)


def _under_way(keeper: KeeperProcess) -> tuple[int, int]:
    """Return the most changes at a time, overall and of one node, by the keeper's log."""
    now: Counter[str] = Counter()
    most = most_on_a_node = 0
    for line in keeper.output.splitlines():
        if "event='started'" in line or any(f"event='{end}'" in line for end in ("done", "dropped", "failed")):
            node = line.partition("node='")[2].partition("'")[0]
            now[node] += 1 if "event='started'" in line else -1
            most, most_on_a_node = max(most, now.total()), max(most_on_a_node, *now.values())
    return most, most_on_a_node


@contextmanager
def cut_off(node: RabbitNode, others: Sequence[RabbitNode]) -> Generator[None]:
    """Cut a node off: nodes with different passwords don't talk, so neither side can reach the other.

    It stays paused until all others consider it down: if one does while another one still reaches it, RabbitMQ detects
    a partial partition, and pauses nodes that are not cut off.
    """
    names = ", ".join(f"'{other.name}'" for other in others)
    node.ctl("eval", f"[erlang:set_cookie(N, stranger) || N <- [{names}]].")
    node.pause()
    try:
        for other in others:
            other.ctl("eval", f"erlang:disconnect_node('{node.name}').")
        node.resume()
        yield
    finally:
        node.resume()
        node.ctl("eval", f"[erlang:set_cookie(N, erlang:get_cookie()) || N <- [{names}]].")
