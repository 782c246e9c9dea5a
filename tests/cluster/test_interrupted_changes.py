"""A proxy is killed, or RabbitMQ stands still, in the middle of a change of queues: no confirmed message is missing.

`make crash` runs ten rounds of each.
"""

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from support.answers import answer
from support.processes import wait_until
from support.proxy import ProxyProcess, plain_client
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

Json: TypeAlias = Any
TOPIC = "/v1/admin/topics/t"
MANY, FEW = 6, 2
ROUNDS, ROUNDS_FULL = 1, 10
CHANGE_SECONDS = 1.2
"""A change takes less than that when nothing disturbs it."""
PAUSE_SECONDS = 3.0
DONE_SECONDS = 60.0

pytestmark = pytest.mark.crash


@pytest.fixture
def cluster(tmp_path: Path, own_node: RabbitNode, redis_server: RedisServer) -> Iterator[ProxyCluster]:
    with ProxyCluster(tmp_path, nodes=(own_node,), redis=redis_server, size=2) as cluster:
        for queues in (MANY, FEW):
            create(cluster.proxies[0], queues)
        yield cluster


def create(proxy: ProxyProcess, queues: int) -> None:
    answer(proxy.client.put(TOPIC, json={"queues": queues}), 200, 201)
    answer(proxy.client.put(f"{TOPIC}/groups/g"), 200, 201)


class Traffic:
    """Publishes and consumes through one proxy. ``confirmed`` and ``received`` are bodies."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self.confirmed: set[str] = set()
        self.received: set[str] = set()
        self._proxy = proxy
        self._number = 0

    def publish(self, count: int) -> None:
        bodies = [f"{self._number + one}" for one in range(count)]
        self._number += count
        messages = [{"body": body, "ordering_key": body} for body in bodies]
        with plain_client(self._proxy.url, timeout_seconds=60) as client:
            results = answer(client.post("/v1/topics/t/messages", json={"messages": messages}))["results"]
        for body, result in zip(bodies, results, strict=True):
            if result["status"] == "published":
                self.confirmed.add(body)

    def drain(self) -> None:
        """Receive and ack until all that was confirmed has been received. A request may fail."""

        def is_drained() -> bool:
            with plain_client(self._proxy.url, timeout_seconds=60) as client:
                popped = client.post("/v1/topics/t/groups/g/pop", json={"max_messages": 100, "wait_seconds": 1})
                messages: list[Json] = popped.json()["messages"] if popped.is_success else []
                handles = [message["receipt_handle"] for message in messages]
                self.received |= {message["body"] for message in messages}
                if handles:
                    client.post("/v1/topics/t/groups/g/ack", json={"receipt_handles": handles})
            return not messages and popped.is_success and self.confirmed <= self.received

        wait_until(is_drained, timeout_seconds=DONE_SECONDS, what=f"all of {len(self.confirmed)} messages")


@contextmanager
def in_background(change: Callable[[], object], errors: list[BaseException]) -> Generator[None]:
    def work() -> None:
        try:
            change()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def disturb(how: str, proxy: ProxyProcess, node: RabbitNode) -> None:
    if how == "kill":
        proxy.kill()
        proxy.start()
    else:
        node.pause()
        time.sleep(PAUSE_SECONDS)
        node.resume()


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_no_confirmed_message_is_missing_after_a_lowering_that_was_interrupted(
    cluster: ProxyCluster, own_node: RabbitNode, seed: int, full_run: bool, how: str
) -> None:
    one, two = cluster.proxies
    traffic, chance = Traffic(two), random.Random(seed)

    def change(queues: int) -> httpx.Response:
        with plain_client(one.url, timeout_seconds=60) as client:
            return client.put(TOPIC, json={"queues": queues})

    def is_changed(queues: int) -> bool:
        try:
            return change(queues).is_success
        except httpx.TransportError:
            return False

    for _ in range(ROUNDS_FULL if full_run else ROUNDS):
        wait_until(lambda: is_changed(MANY), timeout_seconds=DONE_SECONDS, what="more queues")
        traffic.publish(50)
        traffic.drain()
        ignored: list[BaseException] = []
        with in_background(lambda: change(FEW), ignored):
            time.sleep(chance.random() * CHANGE_SECONDS)
            with in_background(lambda: traffic.publish(50), ignored):
                disturb(how, one, own_node)
        repeated = change(FEW)  # brings the surplus queues back into use if they have messages
        assert repeated.status_code in (200, 409, 503), repeated.text
        traffic.drain()
        wait_until(lambda: is_changed(FEW), timeout_seconds=DONE_SECONDS, what="fewer queues")
        traffic.publish(50)
        traffic.drain()
        names = {queue["name"] for queue in own_node.queues(cluster.vhost)}
        assert f"popgate:t:g:{FEW - 1}" in names
        assert f"popgate:t:g:{FEW}" not in names


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_deletion_that_was_interrupted_is_completed_by_another_one(
    cluster: ProxyCluster, own_node: RabbitNode, seed: int, full_run: bool, how: str
) -> None:
    one, two = cluster.proxies
    chance = random.Random(seed)

    def delete(proxy: ProxyProcess) -> int:
        with plain_client(proxy.url, timeout_seconds=60) as client:
            return client.delete(TOPIC).status_code

    for _ in range(ROUNDS_FULL if full_run else ROUNDS):
        create(one, MANY)
        Traffic(two).publish(50)
        ignored: list[BaseException] = []
        with in_background(lambda: delete(one), ignored):
            time.sleep(chance.random() * CHANGE_SECONDS)
            disturb(how, one, own_node)
        wait_until(lambda: delete(two) in (204, 404), timeout_seconds=DONE_SECONDS, what="the deletion")
        create(two, MANY)
        assert answer(two.client.post("/v1/topics/t/groups/g/pop", json={"wait_seconds": 1}))["messages"] == []
        wait_until(lambda: delete(two) == 204, timeout_seconds=DONE_SECONDS, what="the deletion")
        assert not [queue["name"] for queue in own_node.queues(cluster.vhost) if queue["name"].startswith("popgate:t:")]


def test_the_deletion_of_a_lock_that_was_interrupted_is_completed_by_another_one(
    cluster: ProxyCluster, own_node: RabbitNode, seed: int, full_run: bool
) -> None:
    one, two = cluster.proxies
    chance = random.Random(seed)
    path = "/v1/locks/l"

    def delete(proxy: ProxyProcess) -> int:
        with plain_client(proxy.url, timeout_seconds=60) as client:
            return client.delete(path).status_code

    for _ in range(ROUNDS_FULL if full_run else ROUNDS):
        answer(one.client.put(path, json={"kind": "semaphore", "slots": 2}), 200, 201)
        ignored: list[BaseException] = []
        with in_background(lambda: delete(one), ignored):
            time.sleep(chance.random() * CHANGE_SECONDS)
            disturb("kill", one, own_node)
        wait_until(lambda: delete(two) in (200, 404), timeout_seconds=DONE_SECONDS, what="the deletion")
        answer(two.client.put(path, json={"kind": "mutex"}), 200, 201)
        acquired = answer(two.client.post(f"{path}/acquire", json={"holder": "h", "ttl_seconds": 30}))
        assert acquired["acquired"]
        wait_until(lambda: delete(two) == 200, timeout_seconds=DONE_SECONDS, what="the deletion")
