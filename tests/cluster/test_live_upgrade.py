"""A cluster is upgraded one proxy after the other under load, and back; a release too far ahead can't join.

The earlier release speaks version 1 as it was frozen in `releases.earlier_wire`, the next one that and a version 2.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from popgate.cli.endings import ExitCode
from releases.serve import EARLIER, FAR, HEARD_FILE, NEXT, RELEASE_FILE
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess, python_program
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer
from support.rolling_load import RollingLoad

_log = logging.getLogger(__name__)

Json: TypeAlias = Any
PROGRAM = ("env", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", *python_program("-m", "releases.serve"))
SIZE = 3
QUEUES = 6
AGREED_SECONDS = 12.0
AT_ONCE_SECONDS = 2.0
MIXED_SECONDS = 1.0
"""Seconds for which the load continues after each step."""
REFUSED_SECONDS = 15.0
TO_COME = "the proxies use protocol version 1 until all of them support a higher one"


@pytest.fixture
def cluster(tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer) -> Iterator[ProxyCluster]:
    """Three proxies of the earlier release, and an empty topic."""
    cluster = ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=redis_server, size=SIZE, program=PROGRAM)
    for proxy in cluster.proxies:
        install(proxy, EARLIER)
    with cluster:
        client = cluster.proxies[0].client
        assert client.put("/v1/admin/topics/t", json={"queues": QUEUES}).is_success
        assert client.put("/v1/admin/topics/t/groups/g", json={"max_deliveries": None}).is_success
        wait_until(lambda: is_settled(cluster.proxies), timeout_seconds=AGREED_SECONDS, what="all to own queues")
        yield cluster
    for proxy in cluster.proxies:
        log = (proxy.folder / "output.log").read_text(errors="replace")
        assert "Traceback" not in log, log
        assert "understand" not in log, log


def install(proxy: ProxyProcess, release: str) -> None:
    """Install a release, which takes effect at the next start."""
    (proxy.folder / RELEASE_FILE).write_text(release)


def change(proxy: ProxyProcess, release: str, cluster: ProxyCluster) -> None:
    """Stop it in order and start it as that release; return when the cluster of `SIZE` proxies has settled."""
    install(proxy, release)
    proxy.restart()
    wait_until(lambda: is_settled(cluster.proxies), timeout_seconds=AGREED_SECONDS, what="all to own queues")


def seen(proxy: ProxyProcess) -> Json:
    response = proxy.client.get("/v1/admin/cluster")
    assert response.is_success, response.text
    return response.json()


def is_settled(proxies: Sequence[ProxyProcess]) -> bool:
    """Tell whether all agree on the members and on owners, who share the queues evenly."""
    views = [seen(proxy) for proxy in proxies]
    names = {view["instance"] for view in views}
    owners = [{one["broker_queue"]: one["owner"] for one in view["queues"]} for view in views]
    share = Counter(owners[0].values())
    return (
        all({member["instance"] for member in view["members"]} == names for view in views)
        and all(one == owners[0] for one in owners)
        and share == dict.fromkeys(names, QUEUES // SIZE)
    )


def spoken(proxies: Sequence[ProxyProcess]) -> set[int]:
    """Return the versions that the members claim to speak."""
    return {seen(proxy)["protocol"] for proxy in proxies}


def ranges(proxy: ProxyProcess) -> Counter[tuple[int, int]]:
    return Counter((one["protocol"]["min"], one["protocol"]["max"]) for one in seen(proxy)["members"])


def heard(proxy: ProxyProcess) -> list[str]:
    """Return the versions that others used to it, over all its starts, each run of one version once."""
    file = proxy.folder / HEARD_FILE
    return file.read_text().split() if file.exists() else []


def test_a_cluster_is_upgraded_one_by_one_and_back_without_an_error_a_loss_or_a_duplicate(
    cluster: ProxyCluster,
) -> None:
    proxies = cluster.proxies
    first, *_, last = proxies
    load = RollingLoad([proxy.url for proxy in proxies], topic="t", group="g")
    with load:
        for number, proxy in enumerate(proxies):
            assert spoken(proxies) == {1}
            time.sleep(MIXED_SECONDS)
            assert {version for one in proxies for version in heard(one)} == {"1"}, "not all can speak 2"
            change(proxy, NEXT, cluster)
            assert ranges(first) == Counter([(1, 2)] * (number + 1) + [(1, 1)] * (SIZE - number - 1))
            tells_of_one_to_come = TO_COME in CommandLine(first.url)("cluster").err
            assert tells_of_one_to_come == (number + 1 < SIZE)
        wait_until(lambda: spoken(proxies) == {2}, timeout_seconds=AT_ONCE_SECONDS, what="all to speak version 2")
        wait_until(
            lambda: all(heard(proxy)[-1] == "2" for proxy in proxies),
            timeout_seconds=AGREED_SECONDS,
            what="all to be spoken to in version 2",
        )
        upgraded = len(load.published)

        change(last, EARLIER, cluster)
        assert spoken(proxies) == {1}
        time.sleep(MIXED_SECONDS)
        assert [heard(proxy)[-1] for proxy in proxies] == ["1"] * SIZE
    load.assert_kept()
    assert len(load.published) > upgraded > 0
    _log.info("%d messages over an upgrade and a downgrade", len(load.published))


def test_one_that_speaks_no_common_version_refuses_to_join_and_the_cluster_does_not_notice(
    cluster: ProxyCluster, request: pytest.FixtureRequest
) -> None:
    proxies = [*cluster.proxies]
    before = [seen(proxy) for proxy in proxies]
    far = cluster.add()
    cluster.proxies.remove(far)
    install(far, FAR)
    load = RollingLoad([proxy.url for proxy in proxies], topic="t", group="g")
    with load:
        request.addfinalizer(far.close)
        far.launch()
        deadline = time.monotonic() + REFUSED_SECONDS
        while far.is_running():
            assert time.monotonic() < deadline, "it still tries"
            assert [without_counts(seen(proxy)) for proxy in proxies] == [without_counts(view) for view in before]
    load.assert_kept()
    assert len(load.published) > 0
    assert "Traceback" not in far.output
    (line,) = [line for line in far.output.splitlines() if "version" in line]
    assert line.startswith("popgate: this proxy speaks version 3 of the peer protocol, but the cluster has ")
    for view in before[0]["members"]:
        assert f"{view['instance']} at {view['address']} (1)" in line
    assert line.endswith("upgrade through a release that speaks both, or stop those proxies before you start this one")
    assert far.wait(1) == ExitCode.FAILED


def without_counts(view: Json) -> Json:
    """Return the cluster's status without the values that change with each request."""
    members = [{key: one[key] for key in ("instance", "address", "protocol", "queues")} for one in view["members"]]
    return {**view, "members": members}
