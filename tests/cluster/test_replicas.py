"""The replica keeper on three real RabbitMQ nodes, as operators run it.

It observes by HTTP or rabbitmqctl. It changes streams by command line tools, and quorum queues by HTTP if RabbitMQ has
the endpoints (3.11.19, 3.12.1 and newer), otherwise by the tools, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.replicas.proxy_groups import ProxyReplicaGroups
from popgate.replicas.group_memory import RememberedGroups
from popgate_client import Client
from support.command_line import CommandLine, ended
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitCluster, RabbitNode
from support.rabbitmq_releases import RabbitRelease
from support.replicas import (
    KeeperProcess,
    ReplicaCommands,
    declare,
    keeper_environment,
    program,
    replicas_of,
    wait_for_replicas,
)

HAS_ENDPOINTS_FROM = (3, 11, 19)
VOTERS_JOIN_LATE_FROM = (3, 13)
MOVES_LEADERS_FROM = (4, 3, 3)
QUICK = ("--recovery-interval-seconds", "1")
REPAIR_SECONDS = 60


@pytest.fixture
def nodes(three_nodes: RabbitCluster) -> Sequence[RabbitNode]:
    return three_nodes.nodes


@pytest.fixture
def vhost(nodes: Sequence[RabbitNode]) -> Iterator[str]:
    with nodes[0].own_vhost("replicas") as name:
        yield name


@pytest.fixture
def popgate(nodes: Sequence[RabbitNode], vhost: str) -> ReplicaCommands:
    return ReplicaCommands(keeper_environment(nodes, vhost))


@pytest.mark.rabbitmq_versions("3.10")  # by its tools; test_replicas_http has the endpoints of 4.0
def test_a_plan_says_what_each_queue_is_to_have_and_applying_it_gives_them_that(
    popgate: ReplicaCommands, nodes: Sequence[RabbitNode], vhost: str, rabbitmq_release: RabbitRelease
) -> None:
    first = nodes[0]
    declare(first, vhost, "by argument", [first], arguments={"x-popgate-min-replicas": 2})
    declare(first, vhost, "orders; touch x", [first])
    declare(first, vhost, "--ü/%2F", [first], arguments={"x-popgate-min-replicas": 2})
    declare(first, vhost, "stream", [first], kind="stream")
    declare(first, vhost, "by default", [first], size=2)
    declare(first, vhost, "extra", [first], size=3)
    # RabbitMQ places the second member of "by default" anywhere, so no node may be full.
    flags = ("--min-replicas", "1", "--policies", "*=1, orders*=9, stream=2", "--changes-per-node-max", "4")

    rows = popgate.rows("plan", *flags)
    assert {name: (row["wanted"], row["source"], row["verdict"]) for name, row in rows.items()} == {
        "by argument": (2, "argument x-popgate-min-replicas", "add"),
        "orders; touch x": (3, "policy orders*", "add"),
        "--ü/%2F": (2, "argument x-popgate-min-replicas", "add"),
        "stream": (2, "policy stream", "add"),
    }
    assert "9 are requested, but there are only 3 nodes" in rows["orders; touch x"]["reason"]
    assert replicas_of(first, vhost)["by argument"] == ({first.name}, {first.name}), "a plan changes nothing"

    done = popgate("apply", *flags)
    assert done.code == 0, done.err
    assert {name: len(online) for name, (_, online) in replicas_of(first, vhost).items() if ":" not in name} == {
        "by argument": 2,
        "orders; touch x": 3,
        "--ü/%2F": 2,
        "stream": 2,
        "by default": 2,
        "extra": 3,
    }
    shown = popgate("status", *flags)
    way = "management API" if rabbitmq_release.version >= HAS_ENDPOINTS_FROM else "rabbitmq-queues"
    assert f"RabbitMQ {rabbitmq_release}" in shown.err
    assert f"changed by {way}, streams by rabbitmq-streams" in shown.err
    assert {row["verdict"] for row in shown.rows} == {"enough"}


def test_without_the_management_api_rabbitmqctl_tells_the_same(nodes: Sequence[RabbitNode], vhost: str) -> None:
    declare(nodes[0], vhost, "q", [nodes[0]])
    declare(nodes[0], vhost, "s", [nodes[1]], kind="stream")
    by_api = ReplicaCommands(keeper_environment(nodes, vhost)).rows("plan")
    by_tools = ReplicaCommands(keeper_environment(nodes, vhost, management=False)).rows("plan")
    for rows in (by_api, by_tools):
        assert {name: (row["members"], row["online"], row["verdict"]) for name, row in rows.items()} == {
            "q": ([nodes[0].name], [nodes[0].name], "add"),
            "s": ([nodes[1].name], [nodes[1].name], "add"),
        }


def test_without_tools_one_line_says_what_can_not_be_changed_and_what_to_do(
    nodes: Sequence[RabbitNode], vhost: str, rabbitmq_release: RabbitRelease
) -> None:
    declare(nodes[0], vhost, "q", [nodes[0]])
    declare(nodes[0], vhost, "s", [nodes[0]], kind="stream")
    done = ReplicaCommands(keeper_environment(nodes, vhost, tools=False))("apply")
    assert done.code == 1
    reasons = {row["queue"]: row["reason"] for row in done.rows if not row["queue"].startswith("popgate:")}
    assert "only its command line tools report the members of a stream" in reasons.pop("s")
    if rabbitmq_release.version >= HAS_ENDPOINTS_FROM:
        assert reasons == {}
        assert len(replicas_of(nodes[0], vhost)["q"][1]) == 3
    else:
        assert "has failed: this RabbitMQ has no endpoint to change them" in reasons["q"]
        assert "--replica-commands" in reasons["q"]
    assert "Traceback" not in done.err


def test_an_apply_that_is_ended_leaves_no_tool_behind(nodes: Sequence[RabbitNode], vhost: str, tmp_path: Path) -> None:
    declare(nodes[0], vhost, "s", [nodes[0]], kind="stream")  # which the tools change on all versions
    noted, node = tmp_path / "pid", nodes[0].command_prefix()
    hangs = f'case "$*" in *add_replica*) echo $$ > {noted}.new; mv {noted}.new {noted}; exec sleep 300 ;; esac'
    prefix = program(tmp_path, "hangs", f'{hangs}; exec {node} "$@"')
    popgate = CommandLine("http://127.0.0.1:1")
    popgate.environment |= {**keeper_environment(nodes, vhost), "POPGATE_REPLICA_COMMANDS": prefix}
    with popgate.running("replicas", "apply") as process:
        wait_until(noted.exists, timeout_seconds=30, what="the tool to hang")
        process.terminate()
        done = ended(process)
    assert (done.code, done.err) == (143, "")
    assert not Path("/proc", noted.read_text().strip()).exists()


def test_a_node_in_maintenance_gets_no_replica(
    popgate: ReplicaCommands, nodes: Sequence[RabbitNode], vhost: str
) -> None:
    declare(nodes[0], vhost, "q", nodes[:2])
    nodes[2].ctl("drain", tool="rabbitmq-upgrade")
    try:
        row = popgate.rows("plan")["q"]
    finally:
        nodes[2].ctl("revive", tool="rabbitmq-upgrade")
    assert (row["verdict"], row["change"]) == ("no_node", None)
    assert f"{nodes[2].name} is in maintenance" in row["reason"]


def test_a_first_replica_of_a_large_backlog_needs_leave_where_it_votes_at_once(
    popgate: ReplicaCommands, nodes: Sequence[RabbitNode], vhost: str, rabbitmq_release: RabbitRelease
) -> None:
    declare(nodes[0], vhost, "q", [nodes[0]])
    body: dict[str, object] = {"properties": {}, "routing_key": "q", "payload": "x", "payload_encoding": "string"}
    for _ in range(3):
        nodes[0].api("POST", "exchanges", vhost, "amq.default", "publish", body=body)
    flags = ("--stall-messages-max", "2", "--min-replicas", "2")
    wait_until(lambda: nodes[0].queues(vhost)[0].get("messages") == 3, timeout_seconds=20, what="the messages to count")
    first = popgate("apply", *flags)
    if rabbitmq_release.version < VOTERS_JOIN_LATE_FROM:
        assert (first.code, len(replicas_of(nodes[0], vhost)["q"][0])) == (1, 1)
        assert "--allow-stall" in first.rows[0]["reason"]
        first = popgate("apply", *flags, "--allow-stall")
    assert first.code == 0
    assert len(replicas_of(nodes[0], vhost)["q"][1]) == 2


@pytest.mark.rabbitmq_versions("3.10")  # by its tools; test_replicas_http has the endpoints of 4.0
def test_a_leader_moves_to_the_node_of_the_queues_owner_and_its_leases_do_not_notice(
    nodes: Sequence[RabbitNode], vhost: str, tmp_path: Path, rabbitmq_release: RabbitRelease
) -> None:
    first, second, third = nodes
    declare(first, vhost, "adopted", [first, second, third])
    environment = keeper_environment([second, first, third], vhost)
    popgate = ReplicaCommands(environment)

    def leader() -> str:
        return str(first.api("GET", "queues", vhost, "adopted").get("leader"))

    with ProxyProcess(tmp_path, environment=environment) as proxy:
        proxy.client.put("/v1/admin/topics/orders", json={"adopt": ["adopted"]}).raise_for_status()
        with Client(proxy.url) as client:
            client.put_group("orders", "billing")
            published = client.publish("orders", "one", "two")
            assert all(result.ok for result in published)
            held = client.pop("orders", "billing", wait_seconds=20)
            wait_until(
                lambda: any(row["queue"]["name"] == "adopted" for row in first.consumers(vhost)),
                timeout_seconds=20,
                what="RabbitMQ to tell of the consumer",
            )
            shown = popgate("status", "--move-leaders")
            done = popgate("apply", "--move-leaders")
            assert done.code == 0, done.out
            if rabbitmq_release.version >= MOVES_LEADERS_FROM:
                assert "leaders are moved by rabbitmq-queues" in shown.err
                (row,) = [row for row in shown.rows if row["queue"] == "adopted"]
                assert (row["verdict"], row["change"]["kind"], row["change"]["node"]) == ("lead", "lead", second.name)
                wait_until(lambda: leader() == second.name, timeout_seconds=10, what="the leader to be told")
            else:
                assert "leaders are moved by nothing" in shown.err
                assert leader() == first.name
            assert all(result.ok for result in client.ack("orders", "billing", held))
            rest = client.pop("orders", "billing", wait_seconds=20)
            assert sorted(message.body for message in [*held, *rest]) == [b"one", b"two"], "nothing came again"
            assert all(result.ok for result in client.ack("orders", "billing", rest))
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.output


def test_one_keeper_is_at_work_and_when_it_is_killed_the_other_takes_over(
    popgate: ReplicaCommands, nodes: Sequence[RabbitNode], vhost: str, tmp_path: Path
) -> None:
    environment = keeper_environment(nodes, vhost)
    with ExitStack() as stack:
        keepers = [
            stack.enter_context(KeeperProcess(tmp_path / name, environment, *QUICK, "--min-replicas", "2", name=name))
            for name in ("one", "two")
        ]
        wait_until(lambda: any(keeper.is_at_work for keeper in keepers), timeout_seconds=20, what="a keeper to work")
        declare(nodes[0], vhost, "q", [nodes[0]])
        wait_for_replicas(nodes[0], vhost, ["q"], 2, timeout_seconds=REPAIR_SECONDS)
        at_work, other = sorted(keepers, key=lambda keeper: not keeper.is_at_work)
        assert at_work.is_at_work
        assert not other.is_at_work
        assert f":{at_work.pid} " in popgate("status").err
        assert "another replica keeper is at work" in popgate("apply").err
        at_work.kill()
        wait_until(lambda: other.is_at_work, timeout_seconds=20, what="the other keeper to take over")
        declare(nodes[0], vhost, "r", [nodes[1]])
        wait_for_replicas(nodes[0], vhost, ["r"], 2, timeout_seconds=REPAIR_SECONDS)
        assert other.stop() == 0
        assert "Traceback" not in other.output


async def test_a_proxy_keeps_replicas_and_tells_of_it(
    popgate: ReplicaCommands, nodes: Sequence[RabbitNode], vhost: str, tmp_path: Path
) -> None:
    quick = ("--replica-check-interval-seconds", "2", "--replica-recovery-interval-seconds", "1")
    flags = ("--replica-keeper", "--min-replicas", "1", *quick)
    environment = keeper_environment(nodes, vhost)
    with ProxyProcess(tmp_path, *flags, environment=environment) as proxy:
        declare(nodes[0], vhost, "q", [nodes[2]], arguments={"x-quorum-target-group-size": 2})
        declare(nodes[0], vhost, "adopted", [nodes[1]])
        proxy.client.put("/v1/admin/topics/orders", json={"adopt": ["adopted"]}).raise_for_status()
        group = "/v1/admin/topics/orders/groups/billing"
        proxy.client.put(group, json={"min_replicas": 2}).raise_for_status()
        wait_for_replicas(nodes[0], vhost, ["q", "adopted"], 2, timeout_seconds=REPAIR_SECONDS)

        def told() -> bool:
            return any(
                event["event"] == "done" and event["queue"] == "q"
                for event in proxy.client.get("/v1/admin/replicas").json()["events"]
            )

        wait_until(told, timeout_seconds=20, what="the proxy to tell of its change")

        def row(queue: str) -> dict[str, Any]:
            rows = proxy.client.get("/v1/admin/replicas").json()["queues"]
            return next((row for row in rows if row["queue"] == queue), {"verdict": "unknown"})

        wait_until(lambda: row("q")["verdict"] == "enough", timeout_seconds=20, what="the look after the change")
        wait_until(lambda: row("adopted")["verdict"] == "enough", timeout_seconds=20, what="the group's queue, too")
        assert (row("adopted")["asked"], row("adopted")["source"]) == (2, "group orders/billing")
        assert row("popgate:orders:billing:dead")["source"] == "group orders/billing"
        outside = ("status", "--min-replicas", "1", "--policies", "adopted=3")
        shown = popgate.rows(*outside, "--groups-url", f"http://127.0.0.1:1,{proxy.url}")["adopted"]
        assert (shown["asked"], shown["source"]) == (2, "group orders/billing")
        assert popgate.rows(*outside)["adopted"]["source"] == "policy adopted", "nobody was asked"
        proxy.client.put(group, json={"min_replicas": 0}).raise_for_status()
        wait_until(lambda: row("adopted")["asked"] == 0, timeout_seconds=20, what="another number to count")
        answer = proxy.client.get("/v1/admin/replicas").json()
        assert answer["keeps"] is answer["is_at_work"] is True
        assert answer["at_work"]["holder"].endswith(f":{proxy.pid}")
        by_argument = row("q")
        assert (by_argument["wanted"], by_argument["source"]) == (2, "argument x-quorum-target-group-size")
        assert {node["node"] for node in answer["nodes"]} == {node.name for node in nodes}
        metrics = proxy.client.get("/metrics").text
        assert "popgate_replica_keeper_at_work 1.0" in metrics
        assert 'popgate_replica_events_total{event="done",what="add"}' in metrics
        assert 'popgate_replica_queues{verdict="enough"}' in metrics
        outsiders = ProxyReplicaGroups([proxy.url], vhost, None)
        remembered = RememberedGroups(outsiders)
        known = await remembered.asking()
        assert [one.replicas for one in known] == [0]
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.output
        assert await remembered.asking() == known, "what was known last stands in while no proxy answers"
        refused = popgate("plan", "--groups-url", proxy.url)
        assert refused.code == 3
        assert "no proxy reports the replicas of its groups" in refused.err
        await outsiders.close()
