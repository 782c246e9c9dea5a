"""Programs on bare RabbitMQ share a group's queues: twelve queues, real processes that come, go, die and hang.

They discover each other over AMQP ("presence") or through RabbitMQ's management interface. With --full the interface
has its default delay, every scenario runs with both, processes are paused too, and ten minutes of rest follow.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.amqp_apps import AmqpApp, Handled, Traffic, declare_group, lost, overtaken, until_balanced, waits
from support.processes import wait_until
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings

QUEUE_COUNT = 12
BALANCE_SECONDS = 15.0
HEARTBEAT_DETECTION_SECONDS = 16.0
"""RabbitMQ closes a connection that was silent for three heartbeats of 5 s."""
START_SECONDS = 5.0
SEEN_SECONDS = 10.0
STATISTICS_SECONDS = 5.0
"""Maximum seconds until the management interface shows a new consumer."""
GAP_SECONDS = 1.0
ARRIVAL_SECONDS = 10.0
REST_SECONDS, REST_SECONDS_FULL = 3, 600
DEFAULT_STATISTICS = {"management.sample_retention_policies.basic.minute": 5}
"""The test's nodes show changes after a second; RabbitMQ's default is five."""

StartApp = Callable[[str], AmqpApp]


@pytest.fixture(scope="module")
def node(rabbitmq: RabbitNode, full_run: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitNode]:
    """The run's node; with --full, one with RabbitMQ's default configuration."""
    if not full_run:
        yield rabbitmq
        return
    settings = RabbitSettings(configuration=DEFAULT_STATISTICS)
    with RabbitCluster(
        tmp_path_factory.mktemp("default-rabbitmq"), release=rabbitmq.release, settings=settings
    ) as cluster:
        yield cluster.nodes[0]


@pytest.fixture
def vhost(node: RabbitNode) -> Iterator[str]:
    with node.own_vhost("balance") as name:
        yield name


@pytest.fixture
def queues(node: RabbitNode, vhost: str) -> list[str]:
    return declare_group(node.amqp_url(vhost), "orders", "billing", QUEUE_COUNT)


@pytest.fixture(params=["presence", "management"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def app(source: str, node: RabbitNode, vhost: str, tmp_path: Path) -> Iterator[StartApp]:
    """Creates a program without starting it; all programs are ended after the test."""
    management_url = f"http://guest:guest@127.0.0.1:{node.management_port}" if source == "management" else None
    with ExitStack() as stack:

        def make(name: str) -> AmqpApp:
            program = AmqpApp(
                tmp_path, name, "orders", "billing", amqp_url=node.amqp_url(vhost), management_url=management_url
            )
            stack.callback(program.close)
            return program

        yield make


def handled_by(apps: list[AmqpApp]) -> list[Handled]:
    return [one for app in apps for one in app.handled()]


def released(apps: list[AmqpApp]) -> int:
    return sum(app.state()["released"] for app in apps)


def counts_at_the_broker(node: RabbitNode, vhost: str, queues: list[str]) -> dict[str, int]:
    """Return how many queues each program consumes, according to RabbitMQ."""
    rows = [row for row in node.consumers(vhost) if row["active"] and row["queue"]["name"] in queues]
    return Counter(row["consumer_tag"].split(" ")[1].partition(".")[0] for row in rows)


def handled_again(one: AmqpApp, apps: list[AmqpApp], *, since: float) -> list[Handled]:
    """Return what `one` has handled since then, after another one of `apps`."""
    before = {(other.queue, other.number) for other in handled_by([app for app in apps if app is not one])}
    return [each for each in one.handled() if each.at >= since and (each.queue, each.number) in before]


@pytest.mark.quiet
def test_programs_that_come_go_and_die_share_the_queues_evenly_in_order_and_lose_nothing(
    node: RabbitNode,
    vhost: str,
    queues: list[str],
    source: str,
    app: StartApp,
    full_run: bool,
    record_property: Callable[[str, object], None],
) -> None:
    apps = [app(f"app{number}") for number in range(4)]
    seen_seconds = STATISTICS_SECONDS if source == "management" else 0.0
    traffic = Traffic(node.amqp_url(vhost), "orders", QUEUE_COUNT)
    took: dict[str, float] = {}

    def judge_balance(event: str, living: list[AmqpApp], *, detection_seconds: float = seen_seconds) -> None:
        took[event] = until_balanced(living, queues, timeout_seconds=detection_seconds + BALANCE_SECONDS)

    # Nothing is delivered yet: RabbitMQ does not notify a consumer that it is the active one.
    for one in apps[:2]:
        one.launch()
    judge_balance("two start", apps[:2], detection_seconds=START_SECONDS)
    wait_until(
        lambda: counts_at_the_broker(node, vhost, queues) == {"app0": 6, "app1": 6},
        timeout_seconds=SEEN_SECONDS,
        what="RabbitMQ to say the same",
    )
    excused: list[tuple[list[str], float, float]] = []
    """The queues of a hanging program, with the periods."""
    with traffic.flowing():
        for one in apps[2:]:
            one.start()
        judge_balance("two join", apps)
        living = [*apps]
        if full_run or source == "presence":
            living.pop().kill()
            judge_balance("one is killed", living)
        living.pop(0).stop()
        judge_balance("one leaves", living)
        if full_run:
            apps.append(hung := app("late"))
            hung.start()
            judge_balance("one joins", [*living, hung])
            hung.pause()
            paused_at = time.time()
            judge_balance("one hangs", living, detection_seconds=HEARTBEAT_DETECTION_SECONDS)
            excused.append((hung.state()["active"], paused_at, time.time()))
            woken_at = time.time()
            hung.resume()
            living.append(hung)
            judge_balance("it goes on", living)
            time.sleep(GAP_SECONDS)
            # The message that was in work when it was stopped is finished once more; its buffered messages go to the
            # others.
            assert len(handled_again(hung, apps, since=woken_at)) <= len(excused[0][0])
    # The last messages may still be on their way. If one of them is late, its wait below is too long.
    with suppress(TimeoutError):
        wait_until(
            lambda: not lost(traffic, handled_by(apps)), timeout_seconds=ARRIVAL_SECONDS, what="the last messages"
        )
    handled = handled_by(apps)
    waited = [
        (seconds, queue, at)
        for seconds, queue, at in waits(traffic, handled)
        if not any(queues[queue] in names and start - GAP_SECONDS <= at <= end for names, start, end in excused)
    ]
    longest = max(waited)[0]
    told = ", ".join(f"{event}: {seconds:.1f} s" for event, seconds in took.items())
    record_property("told", f"balance of {QUEUE_COUNT} queues by {source}: {told}; longest wait {longest:.2f} s")
    assert {one.state()["learns_from"] for one in living} == {source}
    assert not lost(traffic, handled)
    assert not overtaken(handled)
    assert longest <= GAP_SECONDS

    releases = released(living)
    rest_seconds = REST_SECONDS_FULL if full_run else REST_SECONDS
    time.sleep(rest_seconds)
    assert released(living) == releases
    assert until_balanced(living, queues, timeout_seconds=0) < 1
    record_property("told", f"no release in {rest_seconds} s of rest by {source}")
