"""The dead letters of groups whose owner changes: any proxy passes requests on to the present owner."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.http_server import Json, Topic, answer, problem, put
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

pytestmark = pytest.mark.rabbitmq_versions

LETTERS = 24
SLOWLY = {"rate_per_second": 4}
SECONDS_MAX = 15.0
BODIES = [f"m{number:02}" for number in range(LETTERS)]


@pytest.fixture
def cluster(rabbitmq: RabbitNode, redis_server: RedisServer, tmp_path: Path) -> Iterator[ProxyCluster]:
    """One proxy that owns everything, followed at last by one that owns nothing."""
    with ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=redis_server, size=1) as cluster:
        front = cluster.add("--owns-queues", "false")
        front.start()
        yield cluster


class Letters:
    """A group of one queue with dead letters, as the proxy `through` shows it."""

    def __init__(self, name: str, through: ProxyProcess) -> None:
        self.client = through.client
        self.topic = Topic(self.client, name)
        self.path = f"{self.topic.admin_path}/groups/default/dead-letters"

    def bury(self) -> None:
        put(self.client, self.topic.admin_path, {"queues": 1})
        put(self.client, f"{self.topic.admin_path}/groups/default")
        self.topic.publish(*BODIES)
        for message in self.topic.pop_all(LETTERS, invisibility_seconds=60):
            self.topic.settle("reject", [{"receipt_handle": message["receipt_handle"]}])

    def owner(self) -> str | None:
        queues = answer(self.client.get("/v1/admin/cluster"))["queues"]
        (owner,) = [one["owner"] for one in queues if one["topic"] == self.topic.name]
        return None if owner is None else str(owner)

    def redrive(self, **fields: object) -> Any:
        return self.client.post(f"{self.path}/redrive", json=fields)

    def progress(self) -> Any:
        return self.client.get(f"{self.path}/redrive")

    def wait_for_moved(self) -> None:
        """Wait until the redrive has begun to move letters."""
        wait_for(lambda: answer(self.progress())["moved"] > 0)

    def finish(self) -> None:
        """Redrive the rest: nothing is lost, and nothing is duplicated."""
        done = answer(surely(lambda: self.redrive(wait_seconds=20)))
        assert (done["state"], done["failed"]) == ("done", 0)
        assert answer(self.progress())["id"] == done["id"]
        page = answer(self.client.get(self.path))
        assert (page["messages"], page["dead"]) == ([], 0)
        bodies: list[str] = []
        while messages := self.topic.pop(max_messages=256):
            bodies += [message["body"] for message in messages]
            assert set(self.topic.ack(*messages)) == {"acked"}
        assert sorted(bodies) == BODIES


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX:g} s in vain"
        time.sleep(0.02)


def surely(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat the request while the letters change hands, as Retry-After says but sooner."""
    deadline = time.monotonic() + SECONDS_MAX
    while (response := ask()).status_code == 503 and time.monotonic() < deadline:
        assert int(response.headers["retry-after"]) >= 1
        time.sleep(0.05)
    return response


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_redrive_ends_with_its_proxy_and_goes_on_through_another(cluster: ProxyCluster, way: str) -> None:
    owner, front = cluster.proxies
    letters = Letters("t", front)
    letters.bury()
    before = letters.owner()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: letters.redrive(wait_seconds=20, **SLOWLY))
        wait_for(lambda: letters.progress().status_code == 200)
        letters.wait_for_moved()
        problem(letters.redrive(), 409, "conflict")
        (owner.stop if way == "stop" else owner.kill)()
        ended: httpx.Response = waiting.result()
    if way == "stop":
        told: Json = answer(ended)
        assert told["state"] == "cancelled"
        assert 0 < told["moved"] < LETTERS
        assert "start it again" in told["trouble"]
    else:
        problem(ended, 503, "peer_unavailable")
    wait_for(lambda: letters.owner() is None)
    verbs = (letters.redrive, letters.progress, lambda: letters.client.get(letters.path))
    with ThreadPoolExecutor(len(verbs)) as pool:  # immediately: each is answered when it has waited for an owner
        for response in [pool.submit(verb) for verb in verbs]:
            assert "no proxy owns" in problem(response.result(), 503, "peer_unavailable")["detail"]
    owner.start()
    wait_for(lambda: letters.owner() not in (None, before))
    problem(surely(letters.progress), 404, "redrive_not_found")
    letters.finish()


def test_a_new_owner_sees_to_the_letters_at_once(cluster: ProxyCluster) -> None:
    owner, front = cluster.proxies
    groups = [Letters(f"t{number}", front) for number in range(4)]
    for letters in groups:
        letters.bury()
        assert letters.redrive(**SLOWLY).status_code == 202
    before = {letters.topic.name: letters.owner() for letters in groups}
    for letters in groups:
        letters.wait_for_moved()
    second = cluster.add()
    second.start()
    wait_for(lambda: sum(letters.owner() not in (None, before[letters.topic.name]) for letters in groups) == 2)
    for letters in groups:
        progress = surely(letters.progress)
        if letters.owner() == before[letters.topic.name]:
            assert answer(progress)["state"] == "running"
            assert answer(letters.client.delete(f"{letters.path}/redrive"))["state"] == "cancelled"
        else:
            problem(progress, 404, "redrive_not_found")
    for through in (owner, second, front):
        for letters in groups:
            there = Letters(letters.topic.name, through)
            page = answer(surely(partial(there.client.get, there.path)))
            assert 0 < page["dead"] < LETTERS
    for letters in groups:
        letters.finish()
    for process in cluster.proxies:
        assert "Traceback" not in process.output
