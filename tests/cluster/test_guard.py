"""Which proxies may work on one virtual host: those that share their state, and no others, in either order."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import PortBlock
from support.proxy import CLUSTER_SECRET, ProxyProcess, popgate_command
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

REFUSED_SECONDS_MAX = 30.0
HEARTBEAT = ("--amqp-heartbeat-seconds", "1")
"""A popgate waits three heartbeats for another one that may have been killed."""


@pytest.fixture
def cluster(tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer) -> Iterator[ProxyCluster]:
    with ProxyCluster(tmp_path, *HEARTBEAT, nodes=(rabbitmq,), redis=redis_server, size=2) as cluster:
        yield cluster


def start_refused(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    block = PortBlock()
    command = popgate_command("serve", "--port", str(block.ports[0]), "--data-dir", str(folder), *HEARTBEAT, *arguments)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def refusal(process: "subprocess.Popen[str]") -> str:
    """Return the error text of a proxy that can't start."""
    _, said = process.communicate(timeout=REFUSED_SECONDS_MAX)
    assert process.returncode == 1, said
    return said


def test_those_of_one_cluster_work_side_by_side_and_keep_all_others_out(
    cluster: ProxyCluster, rabbitmq: RabbitNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    url = rabbitmq.amqp_url(cluster.vhost)
    elsewhere = ["--redis-url", redis_server.url(), "--redis-namespace", f"{cluster.vhost}-2"]
    elsewhere += ["--secret", CLUSTER_SECRET]
    others = [
        start_refused(tmp_path / "alone", "--amqp-url", url),
        start_refused(tmp_path / "elsewhere", "--amqp-url", url, *elsewhere),
    ]
    for other in others:
        assert "another popgate uses RabbitMQ" in refusal(other)
    for proxy in cluster.proxies:
        proxy.kill()
    with ProxyProcess(tmp_path / "after", *HEARTBEAT, "--amqp-url", url) as alone:
        late = cluster.add()
        late.launch()
        late.wait(REFUSED_SECONDS_MAX)
        assert "another popgate uses RabbitMQ" in late.output
        alone.kill()
    late.start()
    cluster.proxies[0].start()
    assert cluster.proxies[0].client.get("/readyz").is_success


def test_one_namespace_serves_one_virtual_host(cluster: ProxyCluster, rabbitmq: RabbitNode, tmp_path: Path) -> None:
    rabbitmq.add_vhost(f"{cluster.vhost}-2")
    stray = cluster.add("--amqp-url", rabbitmq.amqp_url(f"{cluster.vhost}-2"))
    stray.launch()
    stray.wait(REFUSED_SECONDS_MAX)
    assert "the records of another RabbitMQ or virtual host" in stray.output
