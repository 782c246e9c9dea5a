"""Three RabbitMQ nodes, two proxies that know all of them, and faults of one node.

A cell is a queue seen through a proxy. Each cell is exercised continuously: publish, pop, ack. These rounds alone
measure how long a cell made no progress. The bounds are RabbitMQ's own times (the next leader comes 0.15 s after a
kill, and 10 s after the last one began to hang), plus `OWN_SECONDS` for everything that popgate and the machine add.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.conftest import assert_kept, assert_no_traceback, report
from contract.brokers import rabbit_broker
from contract.recorder import Recorder, declare, layout, numbered, publish
from popgate.adapters.rabbitmq.options import RabbitOptions
from support.audit import PLAIN, Audit, Traits, Verb, now
from support.audit_client import Client, message_body, until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import COOKIE, RabbitCluster, RabbitNode
from support.redis import RedisServer
from support.turns import Quiet

QUEUES, PROXIES = 6, 2
"""Each queue has a separate topic, so that a client can choose it. No proxy prefers the third node."""
OWN_SECONDS = 2.0
KILLED_SECONDS = 0.15 + OWN_SECONDS
PAUSED_SECONDS = 10.0 + OWN_SECONDS
"""Bound in seconds: a proxy on that node needs two heartbeats, as long as RabbitMQ needs for a leader."""
PARTED_SECONDS = KILLED_SECONDS + 2.0
"""Bound in seconds. The connections break, so the majority has its leaders as after a kill. But the isolated node
lives. Before 4.3 it stops RabbitMQ first (pause_minority), which takes time; only then can the proxy notice.
"""
PAUSE_SECONDS = PAUSED_SECONDS + 2.0
"""Seconds until the others have long considered it down, and serve again."""
LEASE_SECONDS = 120.0
"""Seconds; longer than any test: a message that comes again was acked before, or lost."""
REST_SECONDS = 0.1
WATCH_SECONDS = 1.0
"""Seconds; longer than any permitted stall, so a cell that still makes no progress is noticed."""
PATIENCE_SECONDS = 60.0
BALANCED: dict[str, object] = {
    "pattern": "^popgate:",
    "definition": {"queue-leader-locator": "balanced"},
    "apply-to": "queues",
}

pytestmark = [pytest.mark.crash, pytest.mark.rabbitmq_versions]


@pytest.fixture
def rabbit(three_nodes: RabbitCluster) -> RabbitCluster:
    return three_nodes


class Cell:
    """One queue through one proxy: a message is published, one is popped and acked, in an endless loop."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.client = client
        self.stopping = False
        self.passed: list[float] = []
        """End times of the rounds that succeeded completely."""
        self.steps: list[tuple[float, str]] = []
        """The steps, with their end times."""

    async def run(self) -> None:
        number = 0
        while not self.stopping:
            number += 1
            message_id = f"{self.name} {number}"
            traits = Traits(dedup_id=message_id) if number % 2 else PLAIN
            (sent,) = await self.client.publish([(message_id, message_body(message_id, 100))], [traits])
            self._did(f"publish {sent.status or 'failed'}")
            leases = await self.client.pop(self.name, max_messages=2, wait_seconds=1.0, seconds=LEASE_SECONDS)
            self._did("pop failed" if leases is None else f"pop {len(leases)}")
            if leases:
                await self.client.settle_surely(Verb.ACK, leases)
                self._did("ack")
                if sent.is_promised:
                    self.passed.append(now())
            await asyncio.sleep(REST_SECONDS)

    def _did(self, what: str) -> None:
        self.steps.append((now(), what))

    def still_seconds(self, since: float) -> float:
        """Return the longest time without a successful round after `since`."""
        before = [at for at in self.passed if at <= since][-1:]
        times = [*before, *(at for at in self.passed if at > since), now()]
        return max(later - earlier for earlier, later in pairwise(times))

    def told(self, since: float) -> str:
        return ", ".join(f"{at - since:.2f} {what}" for at, what in self.steps if at > since - 0.5)


class Service:
    """Running proxies. `cells` are all queues through all proxies."""

    def __init__(self, proxies: ProxyCluster, audit: Audit, cells: Sequence[Cell]) -> None:
        self.proxies = proxies
        self.audit = audit
        self.cells = cells

    async def flows(self, *, rounds: int = 5) -> None:
        """Return when every cell has completed that many more rounds."""
        goals = [len(cell.passed) + rounds for cell in self.cells]
        await until(
            lambda: all(len(cell.passed) >= goal for cell, goal in zip(self.cells, goals, strict=True)),
            timeout_seconds=PATIENCE_SECONDS,
            what=lambda: f"rounds of every cell: {[len(cell.passed) for cell in self.cells]} of {goals}",
        )

    def assert_flowed(self, what: str, since: float, *, within_seconds: float) -> None:
        """Assert that no cell stalled for longer."""
        slowest = max(self.cells, key=lambda cell: cell.still_seconds(since))
        seconds = slowest.still_seconds(since)
        report(what, self.audit, longest=f"{seconds:.2f} s of {within_seconds:g} s")
        assert seconds <= within_seconds, f"{slowest.name}: {slowest.told(since)}"

    def ports(self) -> list[set[int]]:
        """Return, for each proxy, the ports of the nodes to which it is connected."""
        return [ports(proxy) for proxy in self.proxies.proxies]

    async def drain(self) -> None:
        """Return when popgate says that nothing is left."""
        deadline = now() + PATIENCE_SECONDS
        clients = [cell.client for cell in self.cells[:QUEUES]]
        while True:
            left = 0
            for client in clients:
                leases = await client.pop("drain", max_messages=256, wait_seconds=0.2, seconds=LEASE_SECONDS)
                if leases:
                    await client.settle_surely(Verb.ACK, leases)
                state = await client.state()
                left += state["ready"] + state["in_flight"] + (leases is None)
            if not left and not self.audit.outstanding():
                return
            assert now() < deadline, (left, self.audit.outstanding()[:5])


@asynccontextmanager
async def service(
    rabbit: RabbitCluster,
    redis: RedisServer,
    folder: Path,
    quiet: Quiet,
    *,
    policy: dict[str, object] | None = None,
) -> AsyncGenerator[Service]:
    """Each queue is led by the node of the proxy that declares it, in turn, unless a policy says otherwise. In the
    end every promise must have been kept.
    """
    audit = Audit()
    proxies = ProxyCluster(folder, nodes=rabbit.nodes, redis=redis, size=PROXIES)
    rabbit.nodes[0].add_vhost(proxies.vhost)
    if policy is not None:
        rabbit.nodes[0].api("PUT", "policies", proxies.vhost, "faults", body=policy)
    with proxies:
        async with AsyncExitStack() as stack:
            cells: list[Cell] = []
            for at, proxy in enumerate(proxies.proxies):
                for queue in range(QUEUES):
                    client = await stack.enter_async_context(Client(proxy.url, audit, topic=f"t{queue}"))
                    cells.append(Cell(f"t{queue} p{at}", client))
            for queue in range(QUEUES):
                await cells[queue % PROXIES * QUEUES + queue].client.create(queues=1)
            await asyncio.to_thread(rabbit.nodes[0].sync)  # a younger queue loses its leader for ever (3.10)
            served = Service(proxies, audit, cells)
            pids = [server.pid for server in (*rabbit.nodes, *proxies.proxies, redis)]
            async with quiet(pids), asyncio.TaskGroup() as tasks:
                for cell in cells:
                    tasks.create_task(cell.run(), name=cell.name)
                await served.flows()
                yield served
                for cell in cells:
                    cell.stopping = True
            await served.drain()
        for proxy in proxies.proxies:
            assert_no_traceback(proxy)
    assert_kept(audit, drained=True)


def leads(node: RabbitNode, vhost: str) -> list[str]:
    """Return the queues of popgate's groups that `node` leads."""
    rows = [one for one in node.queues(vhost) if one["name"].endswith(":default:0")]
    return [one["name"] for one in rows if one.get("leader") == node.name]


def ports(proxy: ProxyProcess) -> set[int]:
    """Return the ports of its connections, each as last reported."""
    told = re.findall(r"connected to RabbitMQ.* purpose='(\w+)' address='127\.0\.0\.1:(\d+)'", proxy.output)
    assert {purpose for purpose, _ in told} == {"consume", "publish", "locks"}
    return {int(port) for port in dict(told).values()}


# ---------------------------------------------------------------- what may happen to a node


async def test_a_killed_node_that_led_queues_and_had_no_proxy_on_it(
    rabbit: RabbitCluster, redis_server: RedisServer, tmp_path: Path, quiet: Quiet
) -> None:
    one, two, three = rabbit.nodes
    async with service(rabbit, redis_server, tmp_path, quiet, policy=BALANCED) as served:
        assert served.ports() == [{one.amqp_port}, {two.amqp_port}]
        assert leads(three, served.proxies.vhost)
        since = served.audit.mark("kill")
        await asyncio.to_thread(three.kill)
        await asyncio.sleep(KILLED_SECONDS + WATCH_SECONDS)
        served.assert_flowed("leader killed", since, within_seconds=KILLED_SECONDS)
        assert served.ports() == [{one.amqp_port}, {two.amqp_port}]


async def test_a_killed_node_that_led_queues_and_had_a_proxy_on_it(
    rabbit: RabbitCluster, redis_server: RedisServer, tmp_path: Path, quiet: Quiet
) -> None:
    one, two, _ = rabbit.nodes
    async with service(rabbit, redis_server, tmp_path, quiet) as served:
        assert leads(one, served.proxies.vhost)
        since = served.audit.mark("kill")
        await asyncio.to_thread(one.kill)
        await asyncio.sleep(KILLED_SECONDS + WATCH_SECONDS)
        served.assert_flowed("a proxy's node killed", since, within_seconds=KILLED_SECONDS)
        assert served.ports() == [{two.amqp_port}] * 2


async def test_a_node_that_is_cut_off_from_the_others_and_comes_back(
    rabbit: RabbitCluster, redis_server: RedisServer, tmp_path: Path, quiet: Quiet
) -> None:
    """A proxy is connected to it, and moves to another node; after its return the node serves as before."""
    one, two, three = rabbit.nodes
    async with service(rabbit, redis_server, tmp_path, quiet) as served:
        assert leads(one, served.proxies.vhost)
        since = served.audit.mark("part")
        try:
            await asyncio.to_thread(part, one, (two, three))
            await asyncio.sleep(PARTED_SECONDS + WATCH_SECONDS)
            served.assert_flowed("a proxy's node cut off", since, within_seconds=PARTED_SECONDS)
            assert served.ports() == [{two.amqp_port}] * 2
            since = served.audit.mark("join")
        finally:
            await asyncio.to_thread(join, one, (two, three))
        await asyncio.to_thread(rabbit.wait_whole)
        await served.flows()
        served.assert_flowed("the node is back", since, within_seconds=PARTED_SECONDS)


def part(node: RabbitNode, others: Sequence[RabbitNode]) -> None:
    """Break the connections between the sides, and prevent new ones: each side gets a wrong password of the other.

    No node may look before all connections are broken. A node that sees a broken connection asks a third node; if that
    one can still reach both sides, RabbitMQ considers it a partial partition, and pauses both (before 4.3).
    """
    blind = "sys, suspend, [rabbit_node_monitor]", "timer, apply_after, [100, sys, resume, [rabbit_node_monitor]]"
    steps = [
        f"Others = {_names(others)}",
        *(f"rpc:multicall([node() | Others], {call})" for call in blind),
        "[erlang:set_cookie(N, parted) || N <- Others]",
        "[erlang:disconnect_node(N) || N <- Others]",
    ]
    node.ctl("eval", f"{', '.join(steps)}.")


def join(node: RabbitNode, others: Sequence[RabbitNode]) -> None:
    node.ctl("eval", f"[erlang:set_cookie(N, '{COOKIE}') || N <- {_names(others)}].")


def _names(nodes: Sequence[RabbitNode]) -> str:
    return f"[{', '.join(repr(node.name) for node in nodes)}]"


async def test_a_node_that_hangs_and_goes_on(
    rabbit: RabbitCluster, redis_server: RedisServer, tmp_path: Path, quiet: Quiet
) -> None:
    """A proxy is connected to it. When it resumes, the others consider it down, and nothing that it still has may
    count.
    """
    one, two, _ = rabbit.nodes
    async with service(rabbit, redis_server, tmp_path, quiet) as served:
        assert leads(one, served.proxies.vhost)
        since = served.audit.mark("pause")
        await asyncio.to_thread(one.pause)
        await asyncio.sleep(PAUSE_SECONDS)
        served.assert_flowed("a proxy's node paused", since, within_seconds=PAUSED_SECONDS)
        assert served.ports() == [{two.amqp_port}] * 2
        since = served.audit.mark("resume")
        one.resume()
        await asyncio.sleep(KILLED_SECONDS + WATCH_SECONDS)
        served.assert_flowed("the node goes on", since, within_seconds=KILLED_SECONDS)
    one.kill()  # it may stay apart: it may be asked before it sees that the others considered it down (3.10)


def test_a_proxy_without_redis_that_is_killed_with_its_node_starts_again_on_another_one(
    rabbit: RabbitCluster, tmp_path: Path
) -> None:
    """The guard and the active consumers of its connections stay registered as long as the node is away (4.3)."""
    vhost = f"alone-{secrets.token_hex(4)}"
    rabbit.nodes[0].add_vhost(vhost)
    urls = ",".join(node.amqp_url(vhost) for node in rabbit.nodes)
    messages, pop = "/v1/topics/t/messages", "/v1/topics/t/groups/default/pop"
    asked = {"max_messages": 1, "wait_seconds": 10, "invisibility_seconds": LEASE_SECONDS}
    with ProxyProcess(tmp_path, "--amqp-url", urls) as proxy:
        for path, asked_for in (("t", {"queues": 1}), ("t/groups/default", {})):
            assert proxy.client.put(f"/v1/admin/topics/{path}", json=asked_for).is_success
        for body in ("leased", "left"):
            answer = proxy.client.post(messages, json={"messages": [{"body": body}]})
            assert answer.json()["results"][0]["status"] == "published"
        (leased,) = proxy.client.post(pop, json=asked).json()["messages"]
        rabbit.nodes[0].sync()
        rabbit.nodes[0].kill()  # first: otherwise it would still see the connections end
        proxy.kill()
        proxy.start()
        (left,) = proxy.client.post(pop, json=asked).json()["messages"]
        assert {leased["body"], left["body"]} == {"leased", "left"}


@pytest.mark.parametrize("is_resized", [True, False], ids=["after a resize", "in the middle of one"])
async def test_what_a_lost_node_returns_goes_before_what_is_new(rabbit: RabbitCluster, is_resized: bool) -> None:
    """Messages held by several consumers of one channel return consumer by consumer, and from 4.3 on with a delay."""
    one, two, three = rabbit.nodes
    vhost = f"lost-{is_resized}"
    one.add_vhost(vhost)
    billing = layout("billing")
    steady, lost, next_one = (
        RabbitOptions(amqp_urls=(node.amqp_url(vhost),), cluster="one", heartbeat_seconds=1)
        for node in (one, three, two)
    )
    old, new = numbered(0, 7), numbered(8, 12)
    async with rabbit_broker(steady) as publisher, rabbit_broker(next_one) as taker, rabbit_broker(lost) as holder:
        await declare(publisher, billing)
        await asyncio.to_thread(one.sync)
        held, taken = Recorder(), Recorder()
        channel = await holder.consume(billing.queues[0], billing, 5, held)
        await publish(publisher, old)
        await held.until_count(5)
        await channel.resize(1 if is_resized else 0)
        taking = asyncio.create_task(taker.consume(billing.queues[0], billing, 100, taken))
        await asyncio.to_thread(three.kill)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await taking
        await publish(publisher, new)
        await taken.until_count(len(old + new))
        assert sorted(taken.bodies[: len(old)]) == old
        assert taken.bodies[len(old) :] == new


async def test_a_queue_whose_leader_does_not_answer_is_not_taken_for_empty(rabbit: RabbitCluster) -> None:
    """RabbitMQ then reports 0 messages. The returned ones were queued before the others arrived here."""
    one, two, _ = rabbit.nodes
    one.add_vhost("slow")
    billing = layout("billing")
    leading, asking = (
        RabbitOptions(amqp_urls=(node.amqp_url("slow"),), cluster="one", heartbeat_seconds=10) for node in (one, two)
    )
    async with rabbit_broker(leading) as leader, rabbit_broker(asking) as asker:
        await declare(leader, billing)
        await publish(leader, numbered(0, 19))
        listener = Recorder()
        channel = await asker.consume(billing.queues[0], billing, 5, listener)
        await listener.until_count(5)
        assert await channel.backlog() == 15
        await asyncio.to_thread(one.pause)
        try:
            assert await channel.backlog() > 0
        finally:
            await asyncio.to_thread(one.resume)
        assert await channel.backlog() == 15
