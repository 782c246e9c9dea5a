"""A cluster whose Redis is behind a Sentinel, or speaks TLS; `contract/test_redis_places` tests the adapter."""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from cluster.conftest import assert_no_traceback, at_work, drain, report
from popgate.cli.endings import ExitCode
from support.answers import answer
from support.audit import Audit
from support.audit_client import until
from support.audit_load import Habits
from support.audit_rules import Kind, explain, judge
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster, owners
from support.rabbitmq import RabbitNode
from support.redis import RedisServer, ReplicatedRedis, SecretiveRedis
from support.tls import Authority

_log = logging.getLogger(__name__)

Json: TypeAlias = Any
SIZE = 2
QUEUES = 6
GROW_COUNT = 150
ENOUGH_COUNT = 10
"""Number of messages; more than one pop returns."""
FAILOVERS, FAILOVERS_FULL = 1, 6
DECIDED_SECONDS = 15.0
"""Maximum seconds for the decision of a Sentinel that waits for half a second before it asks for votes."""
BACK_SECONDS = 4.0
"""Maximum seconds from its decision on."""
LONG_SECONDS = 120.0
"""Seconds; longer than any test, so a lease of that length is live to its end."""
AGREED_SECONDS = 15.0


def is_shared(cluster: ProxyCluster) -> bool:
    """Tell whether all running proxies own queues, and agree on that."""
    running = [proxy for proxy in cluster.proxies if proxy.is_running()]
    views = [owners(proxy) for proxy in running]
    names = {answer(proxy.client.get("/v1/admin/cluster"))["instance"] for proxy in running}
    return all(view == views[0] for view in views) and set(views[0].values()) == names


# ---------------------------------------------------------------- behind a Sentinel


@pytest.fixture
def replicated(redis_server: RedisServer, tmp_path: Path) -> Iterator[ReplicatedRedis]:
    """Depends on the shared Redis, which handles a missing installation."""
    with ReplicatedRedis(tmp_path / "redis") as replicated:
        yield replicated


@pytest.mark.crash
async def test_a_failover_of_redis_costs_a_moment_and_no_message(
    tmp_path: Path, rabbitmq: RabbitNode, replicated: ReplicatedRedis, seed: int, full_run: bool
) -> None:
    """Writes that had not reached the replica when the master died are lost: no more than the requests under way."""
    audit = Audit()
    habits = Habits(
        publishers=1,
        consumers=3,
        batch_max=8,
        open_max=400,
        held_seconds=LONG_SECONDS,
        lease_seconds=LONG_SECONDS / 4,
        expire_share=0.0,
        late_share=0.0,
        attempt_share=0.0,
    )
    failovers = FAILOVERS_FULL if full_run else FAILOVERS
    back: list[float] = []
    with ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=replicated.sentinel.url, size=SIZE) as cluster:
        async with at_work(cluster, audit, seed, habits) as loads:
            for number in range(failovers):
                await loads[0].grow(GROW_COUNT)
                await until(lambda: is_shared(cluster), timeout_seconds=AGREED_SECONDS, what="both to own queues")
                before = owners(cluster.proxies[0])
                back.append(await fail_over(replicated, audit, hang=bool(number % 2)))
                await loads[0].grow(GROW_COUNT)
                for proxy in cluster.proxies:
                    assert owners(proxy) == before, "queues keep their owners"
                if number + 1 < failovers:
                    await come_back(replicated)
                await until(
                    lambda: replicated.master().hearers(cluster.vhost) == SIZE,
                    timeout_seconds=AGREED_SECONDS,
                    what="both to hear of changes",
                )
            # A message whose lease the new master does not know comes again when that lease would have ended.
            await drain(loads, timeout_seconds=LONG_SECONDS + AGREED_SECONDS)
        for proxy in cluster.proxies:
            assert proxy.is_running()
            assert_no_traceback(proxy)
    violations = judge(audit, drained=True)
    kinds = Counter(violation.kind for violation in violations)
    report(f"seed {seed}", audit, back=[round(one, 2) for one in back], violations={**kinds})
    tolerated = {Kind.CAME_AGAIN, Kind.OVERLAP, Kind.COUNT, Kind.REFUSED, Kind.EARLY, Kind.TAKEN}
    assert kinds.keys() <= tolerated, explain([one for one in violations if one.kind not in tolerated])
    under_way = failovers * SIZE * habits.consumers * habits.batch_max
    assert len({violation.message_id for violation in violations}) <= under_way, explain(violations)
    assert max(back) < BACK_SECONDS


async def fail_over(replicated: ReplicatedRedis, audit: Audit, *, hang: bool) -> float:
    """Kill the master, or let it hang; return the seconds from the Sentinel's decision until clients got something."""
    master = replicated.master()
    audit.mark("the master hangs" if hang else "the master is killed")
    await asyncio.to_thread(master.pause if hang else master.kill)
    await until(
        lambda: replicated.master() is not master, timeout_seconds=DECIDED_SECONDS, what="the Sentinel's decision"
    )
    decided, enough = audit.mark("the replica is the master"), audit.lease_count + ENOUGH_COUNT
    await until(lambda: audit.lease_count > enough, timeout_seconds=DECIDED_SECONDS, what="clients to get more")
    return audit.mark("leases are given") - decided


async def come_back(replicated: ReplicatedRedis) -> None:
    """Let the former master become a replica. One that hung considers itself the master until it is notified."""
    master = replicated.master()
    (former,) = [server for server in replicated.servers if server is not master]
    if former.is_running():
        former.resume()
    await asyncio.to_thread(former.start)
    await asyncio.to_thread(replicated.wait_replicated, former)


# ---------------------------------------------------------------- over TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def secretive(redis_server: RedisServer, tmp_path: Path, authority: Authority) -> Iterator[SecretiveRedis]:
    """Depends on the shared Redis, which handles a missing installation."""
    with SecretiveRedis(tmp_path / "redis", authority) as server:
        yield server


def test_proxies_share_a_redis_that_speaks_tls(
    tmp_path: Path, rabbitmq: RabbitNode, secretive: SecretiveRedis, authority: Authority
) -> None:
    certificate, key = authority.certify("proxy")
    url = secretive.tls_url(ssl_ca_certs=authority.certificate, ssl_certfile=certificate, ssl_keyfile=key)
    with ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=url, size=SIZE) as cluster:
        one, two = cluster.proxies
        answer(one.client.put("/v1/admin/topics/t", json={"queues": QUEUES}), 201)
        answer(one.client.put("/v1/admin/topics/t/groups/g", json={}), 201)
        wait_until(lambda: is_shared(cluster), timeout_seconds=AGREED_SECONDS, what="both to own queues")
        assert secretive.hearers(cluster.vhost) == SIZE
        assert ports_of_clients(secretive) == {secretive.tls_port}
        entries = [{"body": str(number)} for number in range(60)]
        answer(one.client.post("/v1/topics/t/messages", json={"messages": entries}))
        first = pop(two, 40)
        one.kill()
        assert ack(two, first) == {"acked": 40}
        wait_until(lambda: is_shared(cluster), timeout_seconds=AGREED_SECONDS, what="the other one to own all queues")
        rest = pop(two, 20)
        one.start()
        assert ack(one, rest) == {"acked": 20}
        assert sorted(message["body"] for message in first + rest) == sorted(entry["body"] for entry in entries)
        for proxy in cluster.proxies:
            assert_no_traceback(proxy)


def ports_of_clients(server: RedisServer) -> set[int]:
    """Return the ports from which its clients are connected, except the caller's."""
    clients = server.ask("CLIENT LIST")
    return {int(client["laddr"].rpartition(":")[2]) for client in clients if client["cmd"] != "client|list"}


def pop(proxy: ProxyProcess, count: int) -> list[Json]:
    messages: list[Json] = []
    deadline = time.monotonic() + AGREED_SECONDS
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} came, not {count}"
        body = {"max_messages": count - len(messages), "wait_seconds": 1, "invisibility_seconds": 60}
        messages += answer(proxy.client.post("/v1/topics/t/groups/g/pop", json=body))["messages"]
    return messages


def ack(proxy: ProxyProcess, messages: list[Json]) -> Counter[str]:
    handles = [message["receipt_handle"] for message in messages]
    results = answer(proxy.client.post("/v1/topics/t/groups/g/ack", json={"receipt_handles": handles}))["results"]
    return Counter(result["status"] for result in results)


@pytest.mark.parametrize("what", ["another authority", "no certificate"])
def test_a_proxy_that_redis_and_it_do_not_trust_each_other_does_not_start(
    tmp_path: Path, amqp_url: str, secretive: SecretiveRedis, authority: Authority, what: str
) -> None:
    if what == "another authority":
        stranger = Authority(tmp_path / "stranger")
        certificate, key = authority.certify("proxy")
        url = secretive.tls_url(ssl_ca_certs=stranger.certificate, ssl_certfile=certificate, ssl_keyfile=key)
        said = r"and popgate do not trust each other \(.*certificate verify failed.*\): check ssl_ca_certs"
    else:
        url = secretive.tls_url(ssl_ca_certs=authority.certificate)
        said = ""  # its refusal may be overtaken by the end of the connection
    proxy = ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url, "--redis-url", url)
    try:
        proxy.launch()
        assert proxy.wait(20) == ExitCode.FAILED
    finally:
        proxy.close()
    *_, line = proxy.output.splitlines()
    place = re.escape(f"127.0.0.1:{secretive.tls_port}/0")
    assert re.match(rf"popgate: Redis at {place} {said}", line), line
