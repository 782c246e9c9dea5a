"""Pull clients as processes, over several proxies: clients and proxies are killed and paused. Order per queue holds,
nothing is lost, and only uncommitted messages come twice.
"""

import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from support.processes import wait_until
from support.proxy_cluster import ProxyCluster
from support.pull_worker import PullWorker
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

Json: TypeAlias = Any
SIZE, QUEUES, WORKERS = 3, 6, 4
SESSION_SECONDS = 2.0
TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"
ADMIN = "/v1/admin/topics/t"
ROUNDS, ROUNDS_FULL = 1, 12
DRAINED_SECONDS = 40.0


class Publisher(threading.Thread):
    """Publishes consecutive numbers, each once, until it is stopped."""

    def __init__(self, cluster: ProxyCluster) -> None:
        super().__init__(name="publisher")
        self._cluster = cluster
        self._stopped = threading.Event()
        self.count = 0

    def run(self) -> None:
        clients = itertools.cycle([proxy.client for proxy in self._cluster.proxies])
        client = next(clients)
        while not self._stopped.wait(0.05):
            bodies = [f"{number:06}" for number in range(self.count, self.count + 12)]
            messages = [{"body": body, "dedup_id": body} for body in bodies]
            while not self._stored(client, messages):
                client = next(clients)
                time.sleep(0.1)
            self.count += len(bodies)

    @staticmethod
    def _stored(client: httpx.Client, messages: Sequence[Json]) -> bool:
        try:
            response = client.post(f"{TOPIC}/messages", json={"messages": messages}, timeout=20)
        except httpx.HTTPError:
            return False
        if not response.is_success:
            return False
        return {result["status"] for result in response.json()["results"]} <= {"published", "duplicate"}

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive():
            self.join()


def judge(lines: Sequence[Json], count: int) -> list[str]:
    """Return the broken promises as text."""
    wrong: list[str] = []
    by_queue: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        if line["kind"] == "got":
            by_queue[line["queue"]] |= {*line["bodies"]}
    places = {queue: {body: place for place, body in enumerate(sorted(bodies))} for queue, bodies in by_queue.items()}
    if sorted(body for bodies in by_queue.values() for body in bodies) != [f"{number:06}" for number in range(count)]:
        wrong.append(f"{sum(map(len, by_queue.values()))} of {count} messages were seen")
    for queue, place in places.items():
        of_queue = [line for line in lines if line.get("queue") == queue]
        commits = [(place[line["body"]], line) for line in of_queue if line["kind"] == "committed"]
        tried = [(place[line["body"]], line["asked"]) for line in of_queue if line["kind"] == "commits"]
        if max((at for at, _ in commits), default=-1) < len(place) - 1:
            wrong.append(f"queue {queue}: not all was committed")
        for got in (line for line in of_queue if line["kind"] == "got"):
            taken = [place[body] for body in got["bodies"]]
            if taken != [*range(taken[0], taken[0] + len(taken))]:
                wrong.append(f"queue {queue}: out of order, or with a gap: {got}")
            before = [at for at, line in commits if line["answered"] < got["asked"]]
            if taken[0] <= max(before, default=-1):
                wrong.append(f"queue {queue}: committed, and came again: {got}")
            seen = -1 if got["after"] is None else place[got["after"]]
            done = max((at for at, asked in tried if asked < got["answered"]), default=-1)
            if taken[0] > max(seen, done) + 1:
                wrong.append(f"queue {queue}: something was passed over: {got}")
        wrong += [f"queue {queue}: {line}" for line in _not_fenced(of_queue, place)]
    return wrong


def _not_fenced(of_queue: Sequence[Json], place: dict[str, int]) -> list[str]:
    """Return commits that counted although another client had been given the same messages meanwhile."""
    found: list[str] = []
    gots = [line for line in of_queue if line["kind"] == "got"]
    for commit in (line for line in of_queue if line["kind"] == "committed" and line["count"]):
        own = [got for got in gots if got["by"] == commit["by"] and commit["body"] in got["bodies"]]
        since = max(got["answered"] for got in own if got["answered"] <= commit["asked"])
        for other in gots:
            is_later = since < other["asked"] and other["answered"] < commit["asked"]
            if other["by"] != commit["by"] and is_later and place[other["bodies"][0]] <= place[commit["body"]]:
                found.append(f"{commit} counted after {other}")
    return found


@pytest.mark.crash
def test_pull_clients_and_proxies_that_die_or_sleep_lose_nothing_and_keep_the_order(
    tmp_path: Path,
    rabbitmq: RabbitNode,
    redis_server: RedisServer,
    seed: int,
    full_run: bool,
    record_property: Callable[[str, object], None],
) -> None:
    chance = random.Random(seed)
    flags = ("--pull-session-seconds", str(SESSION_SECONDS))
    with ProxyCluster(tmp_path, *flags, nodes=(rabbitmq,), redis=redis_server, size=SIZE) as cluster:
        client = cluster.proxies[0].client
        assert client.put(ADMIN, json={"queues": QUEUES}).is_success
        assert client.put(f"{ADMIN}/groups/g", json={"max_deliveries": 1_000}).is_success
        mode = f"{ADMIN}/groups/g/consume-mode"
        assert client.put(mode, json={"mode": "pull", "drain_timeout_seconds": 0}).is_success
        wait_until(lambda: client.get(mode).json()["converged"], timeout_seconds=20, what="pull mode")
        urls = [proxy.url for proxy in cluster.proxies]
        workers: list[PullWorker] = []

        def add() -> None:
            number = len(workers)
            turned = [*urls[number % SIZE :], *urls[: number % SIZE]]
            workers.append(PullWorker(tmp_path, f"w{number}", GROUP, turned, patience=1 + number % 3))
            workers[-1].start()

        publisher = Publisher(cluster)
        try:
            for _ in range(WORKERS):
                add()
            publisher.start()
            for _ in range(ROUNDS_FULL if full_run else ROUNDS):
                killed, slept, *_ = chance.sample([worker for worker in workers if worker.is_running()], WORKERS)
                time.sleep(1.5)
                killed.kill()
                slept.pause()
                proxy = chance.choice(cluster.proxies)
                time.sleep(chance.uniform(0.0, 2.0))
                proxy.kill()
                add()
                time.sleep(SESSION_SECONDS + 1.0)
                slept.resume()
                proxy.start()
                hung = chance.choice([one for one in cluster.proxies if one is not proxy])
                hung.pause()
                time.sleep(chance.choice([0.5, 8.0]) if full_run else 0.5)
                hung.resume()
            publisher.stop()

            def is_drained() -> bool:
                state = client.get(GROUP).json()
                return "ready" in state and state["ready"] == state["in_flight"] == 0

            wait_until(is_drained, timeout_seconds=DRAINED_SECONDS, what="all to be committed")
            time.sleep(0.5)  # the last commits are written down
        finally:
            publisher.stop()
            for worker in workers:
                worker.close()
        lines = [line for worker in workers for line in worker.lines()]
        wrong = judge(lines, publisher.count)
        assert not wrong, "\n".join(wrong[:20])
        figures = Counter(line["kind"] for line in lines)
        assert figures["got"] > 50
        record_property("told", f"pull clients: {publisher.count} messages, {figures}")
        for proxy in cluster.proxies:
            assert "Traceback" not in (proxy.folder / "output.log").read_text(errors="replace")
