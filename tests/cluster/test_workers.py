"""Several workers behind one port: the distribution of clients, and the effects when one worker, or the parent,
ends.
"""

import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx
import pytest

from cluster.conftest import assert_no_traceback
from support.answers import answer
from support.processes import PortBlock, wait_until
from support.proxy import CLUSTER_SECRET, ProxyProcess, plain_client, popgate_command
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

Json: TypeAlias = Any
WORKERS = 4
CONNECTIONS = 32
QUEUES = 8
RETRIED = (502, 503, 504)
EXIT_SECONDS = 2.0
EXIT_SLACK_SECONDS = 1.0
"""Extra seconds for a busy machine."""
BATCH, OPEN_MAX = 10, 60
LEASE_SECONDS = 5
"""Maximum seconds that a message may be missing if no client got the answer with its lease."""
AGAIN_SECONDS = 20.0
"""Maximum seconds to be restarted, on such a machine, and to get queues."""
ENDED = "a worker has ended and will be restarted"
TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"


@pytest.fixture(scope="module")
def flags(rabbitmq: RabbitNode, redis_server: RedisServer) -> Sequence[str]:
    """Return the flags of a proxy that has RabbitMQ's virtual host and Redis' namespace to itself."""
    name = f"workers-{secrets.token_hex(4)}"
    rabbitmq.add_vhost(name)
    return ["--amqp-url", rabbitmq.amqp_url(name), "--redis-url", redis_server.url(), "--redis-namespace", name]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, flags: Sequence[str]) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("workers"), *flags, "--workers", str(WORKERS)) as proxy:
        yield proxy


@pytest.fixture
def running(shared: ProxyProcess) -> Iterator[ProxyProcess]:
    shared.start()
    yield shared
    assert_no_traceback(shared)


@pytest.fixture
def proxy(running: ProxyProcess) -> ProxyProcess:
    """All workers run, and the one topic with its group is empty."""
    with plain_client(running.url, timeout_seconds=40) as client:
        answer(client.delete("/v1/admin/topics/t"), 204, 404)
        answer(client.put("/v1/admin/topics/t", json={"queues": QUEUES}), 201)
        answer(client.put("/v1/admin/topics/t/groups/g", json={"max_deliveries": 50}), 201)
        wait_until(lambda: is_balanced(client), timeout_seconds=AGAIN_SECONDS, what="all workers to own queues")
    return running


def cluster(client: httpx.Client) -> Json:
    return answer(client.get("/v1/admin/cluster"))


def is_balanced(client: httpx.Client) -> bool:
    """Tell whether the workers' queue counts differ by at most one."""
    status = cluster(client)
    counts = [member["queues"] for member in status["members"]]
    return len(counts) == WORKERS and sum(counts) == QUEUES and max(counts) - min(counts) <= 1


def children(parent: int) -> set[int]:
    """Return the running child processes of this one."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(its_parent) == parent and state != "Z":
            found.add(int(stat.parent.name))
    return found


def stand_still(pids: set[int]) -> bool:
    return all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in pids)


def are_gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def instances(proxy: ProxyProcess) -> set[str]:
    """Return the workers that serve, found by two clients for each worker."""
    with ExitStack() as stack:
        clients = [stack.enter_context(plain_client(proxy.url, timeout_seconds=40)) for _ in range(2 * WORKERS)]
        return {cluster(client)["instance"] for client in clients}


class OneOfEach:
    """A keep-alive connection to each worker, as a context manager that closes them."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._proxy = proxy
        self._stack = ExitStack()

    def __enter__(self) -> list[httpx.Client]:
        found: dict[str, httpx.Client] = {}
        while len(found) < WORKERS:
            client = self._stack.enter_context(plain_client(self._proxy.url, timeout_seconds=40))
            found.setdefault(cluster(client)["instance"], client)
        return [*found.values()]

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# ---------------------------------------------------------------- one port


def scraped(proxy: ProxyProcess, instance: str) -> int:
    """Return how often the metrics of this worker have been read, as its metrics say."""
    metrics = proxy.client.get("/metrics", params={"proxy": instance}).text
    found = re.search(r'^popgate_http_requests_total{operation="metrics",status="200"} (.+)$', metrics, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def test_the_workers_are_members_of_one_cluster_and_each_has_an_address_of_its_own(proxy: ProxyProcess) -> None:
    status = cluster(proxy.client)
    assert len({member["instance"] for member in status["members"]}) == WORKERS
    assert len(children(proxy.pid)) == WORKERS
    scrapes = [[scraped(proxy, member["instance"]) for member in status["members"]] for _ in range(2)]
    # The worker with this client's connection also counts the requests that it passes on.
    assert sorted(later - earlier for earlier, later in zip(*scrapes, strict=True)) == [*[1] * (WORKERS - 1), WORKERS]
    addresses = {member["address"] for member in status["members"]}
    assert len(addresses) == WORKERS
    for address in addresses:  # only proxies of the cluster are served there
        assert address.startswith("https://127.0.0.1:")
        with plain_client(address, timeout_seconds=10) as client, pytest.raises(httpx.TransportError):
            client.get("/readyz")


def test_the_banner_is_said_once_when_all_are_ready(running: ProxyProcess) -> None:
    assert running.output.count(f"with {WORKERS} workers: {running.url}") == 1
    assert running.output.count("stop: Ctrl-C") == 1


@pytest.mark.parametrize("way", ["at once", "one after the other"])
def test_clients_that_stay_connected_are_spread_over_the_workers(running: ProxyProcess, way: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(plain_client(running.url, timeout_seconds=40)) for _ in range(CONNECTIONS)]
        threads = stack.enter_context(ThreadPoolExecutor(CONNECTIONS if way == "at once" else 1))
        served_by = Counter(status["instance"] for status in threads.map(cluster, clients))
    assert len(served_by) == WORKERS
    assert max(served_by.values()) <= 2 * CONNECTIONS / WORKERS, served_by


def test_a_client_is_not_left_to_a_worker_that_hangs(running: ProxyProcess) -> None:
    """It has fewer connections than the others, but does not accept any."""
    with OneOfEach(running) as clients, ExitStack() as stack:
        hung = next(iter(children(running.pid)))
        os.kill(hung, signal.SIGSTOP)
        stack.callback(os.kill, hung, signal.SIGCONT)
        began = time.monotonic()
        more = [stack.enter_context(plain_client(running.url, timeout_seconds=10)) for _ in range(CONNECTIONS)]
        assert {client.get("/healthz").status_code for client in more} == {200}
        assert time.monotonic() - began < 5
        assert len(clients) == WORKERS, "they stay connected"


def test_a_connection_that_waits_outlives_a_worker(running: ProxyProcess) -> None:
    """The remaining workers accept all connections that were not accepted yet."""
    workers = children(running.pid)
    with ExitStack() as stack:
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: stand_still(workers), timeout_seconds=10, what="the workers to stand still")
        waiting = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=20)) for _ in range(16)
        ]
        for connection in waiting:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        dead = workers.pop()
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: are_gone({dead}), timeout_seconds=10, what="a worker to end")
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        assert {connection.recv(15) for connection in waiting} == {b"HTTP/1.1 200 OK"}


def test_every_operation_is_served_by_any_worker(proxy: ProxyProcess) -> None:
    with OneOfEach(proxy) as clients:
        count = 20 * WORKERS
        for at, client in enumerate(clients):
            entries = [{"body": f"{at}-{number}"} for number in range(20)]
            results = answer(client.post(f"{TOPIC}/messages", json={"messages": entries}))["results"]
            assert {result["status"] for result in results} == {"published"}
        messages: list[Json] = []
        for client in itertools.cycle(clients):
            if len(messages) == count:
                break
            messages += answer(client.post(f"{GROUP}/pop", json={"max_messages": 7, "wait_seconds": 5}))["messages"]
        assert len({message["body"] for message in messages}) == count
        handles = [message["receipt_handle"] for message in messages]
        for at, client in enumerate(clients):
            own = handles[at * 20 : at * 20 + 20]
            extended = [{"receipt_handle": handle, "invisibility_seconds": 60} for handle in own[:10]]
            assert statuses(client, "extend", entries=extended) == {"extended"}
            assert statuses(clients[at - 1], "ack", receipt_handles=own[:10]) == {"acked"}
            assert statuses(client, "ack", receipt_handles=own[:10]) == {"already_acked"}
            released = [{"receipt_handle": handle} for handle in own[10:15]]
            assert statuses(clients[at - 2], "release", entries=released) == {"released"}
            rejected = [{"receipt_handle": handle} for handle in own[15:]]
            assert statuses(clients[at - 3], "reject", entries=rejected) == {"rejected"}
        left = 0
        while left < 5 * WORKERS:
            again = answer(clients[0].post(f"{GROUP}/pop", json={"max_messages": 256, "wait_seconds": 5}))["messages"]
            assert again
            assert statuses(clients[1], "ack", receipt_handles=[one["receipt_handle"] for one in again]) == {"acked"}
            left += len(again)
        assert [answer(client.get(GROUP))["dead"] for client in clients] == [5 * WORKERS] * WORKERS


def statuses(client: httpx.Client, operation: str, **body: object) -> set[str]:
    return {result["status"] for result in answer(client.post(f"{GROUP}/{operation}", json=body))["results"]}


# ---------------------------------------------------------------- a worker ends


class Work:
    """A publisher and consumers that retry unanswered requests, as a context manager; after it, everything published
    has been acked.
    """

    def __init__(self, proxy: ProxyProcess, consumers: int = 6) -> None:
        self._proxy = proxy
        self.published: list[str] = []
        self.acked: set[str] = set()
        self.failures: list[str] = []
        self.again: list[str] = []
        """Messages that came after they were acked."""
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._produce)]
        self._threads += [threading.Thread(target=self._consume, args=(number,)) for number in range(consumers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def grow(self, count: int) -> None:
        """Return when that many more are acked."""
        until = len(self.acked) + count
        wait_until(lambda: len(self.acked) >= until, timeout_seconds=40, what=f"{count} more to be acked")

    def _post(self, client: httpx.Client, path: str, body: Json) -> Json | None:
        why = ""
        for _ in range(2):
            try:
                response = client.post(path, json=body)
            except httpx.TransportError as error:
                why = f"{path}: {error!r}"
                continue
            if response.is_success:
                return response.json()
            why = f"{path}: {response.text}"
            if response.status_code not in RETRIED:
                break
        self.failures.append(why)
        time.sleep(0.05)
        return None

    def _produce(self) -> None:
        with plain_client(self._proxy.url, timeout_seconds=30) as client:
            for first in itertools.count(step=BATCH):
                if self._done.is_set():
                    return
                bodies = [f"m{number}" for number in range(first, first + BATCH)]
                entries = [{"body": body, "ordering_key": f"k{at}", "dedup_id": body} for at, body in enumerate(bodies)]
                while not self._are_stored(self._post(client, f"{TOPIC}/messages", {"messages": entries})):
                    pass
                self.published += bodies
                while len(self.published) - len(self.acked) > OPEN_MAX:
                    time.sleep(0.01)

    @staticmethod
    def _are_stored(given: Json | None) -> bool:
        results: list[Json] = [] if given is None else given["results"]
        return bool(results) and all(result["status"] in ("published", "duplicate") for result in results)

    def _consume(self, consumer: int) -> None:
        with plain_client(self._proxy.url, timeout_seconds=30) as client:
            for attempt in itertools.count():
                asked = {"max_messages": 8, "wait_seconds": 2, "invisibility_seconds": LEASE_SECONDS}
                given = self._post(client, f"{GROUP}/pop", {**asked, "attempt_id": f"{consumer}-{attempt}"})
                messages: list[Json] = [] if given is None else given["messages"]
                self.again += [message["body"] for message in messages if message["body"] in self.acked]
                if messages:
                    handles = [message["receipt_handle"] for message in messages]
                    settled = self._post(client, f"{GROUP}/ack", {"receipt_handles": handles})
                    for message, result in zip(messages, settled["results"] if settled else (), strict=bool(settled)):
                        if result["status"] in ("acked", "already_acked"):
                            self.acked.add(message["body"])
                elif self._done.is_set() and len(self.acked) >= len(self.published):
                    return


def test_a_worker_that_is_killed_under_load_is_missed_by_nobody_and_is_started_again(proxy: ProxyProcess) -> None:
    before, ended_before = children(proxy.pid), proxy.output.count(ENDED)
    members = {member["instance"] for member in cluster(proxy.client)["members"]}
    with Work(proxy) as work, plain_client(proxy.url, timeout_seconds=30) as client:
        work.grow(200)
        os.kill(min(before), signal.SIGKILL)
        work.grow(200)
        wait_until(lambda: len(children(proxy.pid)) == WORKERS, timeout_seconds=AGAIN_SECONDS, what="another worker")
        wait_until(lambda: is_balanced(client), timeout_seconds=AGAIN_SECONDS, what="all workers to own queues")
        work.grow(200)
        now = {member["instance"] for member in cluster(client)["members"]}
    assert work.failures == []
    assert work.again == []
    assert work.acked == set(work.published)
    assert len(members & now) == WORKERS - 1
    assert len(before & children(proxy.pid)) == WORKERS - 1
    lines = [line for line in proxy.output.splitlines() if ENDED in line][ended_before:]
    assert len(lines) == 1
    assert "why='signal 9'" in lines[0]


def test_a_worker_that_can_not_be_started_again_is_tried_again(
    tmp_path: Path, redis_server: RedisServer, rabbitmq: RabbitNode
) -> None:
    """Meanwhile the other one continues. `redis_server` is requested because it handles a missing installation."""
    rabbitmq.add_vhost(tmp_path.name)
    with RedisServer(tmp_path / "redis") as redis:
        flags = ("--amqp-url", rabbitmq.amqp_url(tmp_path.name), "--redis-url", redis.url(), "--workers", "2")
        with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
            redis.stop()
            os.kill(min(children(proxy.pid)), signal.SIGKILL)
            wait_until(lambda: proxy.output.count(ENDED) >= 3, timeout_seconds=AGAIN_SECONDS, what="two attempts")
            with plain_client(proxy.url, timeout_seconds=10) as client:
                assert client.get("/healthz").is_success
            redis.start()
            lines = [line for line in proxy.output.splitlines() if ENDED in line]
            assert "signal 9" in lines[0]
            assert "Redis at" in lines[1]
            assert "Redis at" in lines[2]
            wait_until(lambda: len(instances(proxy)) == 2, timeout_seconds=AGAIN_SECONDS, what="two workers to serve")
            assert_no_traceback(proxy)


# ---------------------------------------------------------------- all end


def ends(proxy: ProxyProcess, *, within_seconds: float = EXIT_SECONDS + EXIT_SLACK_SECONDS) -> int:
    """Return the exit code of a process that was told to end, and that must leave no process behind."""
    workers = children(proxy.pid)
    code = proxy.wait(within_seconds)
    assert are_gone(workers)
    return code


def test_sigterm_under_load_ends_all_in_time_and_nothing_is_lost(proxy: ProxyProcess) -> None:
    with Work(proxy) as work:
        work.grow(100)
        proxy.signal(signal.SIGTERM)
        assert ends(proxy) == 0
        assert "gave up" not in proxy.output
        proxy.start()
        work.grow(20)
    assert work.again == []
    assert work.acked == set(work.published)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_each_process_ends_all_in_order_too(proxy: ProxyProcess, number: signal.Signals) -> None:
    """A terminal sends SIGINT to all of them, and a service manager may do so with SIGTERM."""
    with parked_pops(proxy) as answers:
        os.killpg(proxy.pid, number)
        assert ends(proxy) == 0
    assert [given.json() for given in answers] == [{"messages": []}] * WORKERS
    assert "gave up" not in proxy.output


def test_a_second_signal_ends_all_at_once(proxy: ProxyProcess) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as slow:
        # An endless request delays the first exit.
        slow.sendall(b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        with parked_pops(proxy):
            proxy.signal(signal.SIGTERM)
        # Their answers show that the first signal was received.
        assert proxy.is_running()
        proxy.signal(signal.SIGTERM)
        assert ends(proxy, within_seconds=0.5) == 128 + signal.SIGTERM


@contextmanager
def parked_pops(proxy: ProxyProcess) -> Generator[list[httpx.Response]]:
    """Keep a pop waiting at each worker; yield their answers, which are complete after the block."""
    answers: list[httpx.Response] = []
    with OneOfEach(proxy) as clients, ThreadPoolExecutor(WORKERS) as threads:
        waiting = [threads.submit(client.post, f"{GROUP}/pop", json={"wait_seconds": 30}) for client in clients]
        time.sleep(0.5)  # a pop that has not arrived by then gets no answer
        yield answers
        answers += [one.result() for one in waiting]


def test_workers_do_not_outlive_their_parent(proxy: ProxyProcess) -> None:
    workers = children(proxy.pid)
    with Work(proxy, consumers=2) as work:
        work.grow(20)
        os.kill(proxy.pid, signal.SIGKILL)
        proxy.wait(EXIT_SECONDS)
        seconds = EXIT_SECONDS + EXIT_SLACK_SECONDS
        wait_until(lambda: are_gone(workers), timeout_seconds=seconds, what="the workers to end")
        assert "gave up" not in proxy.output, "they end in order"
        proxy.start()
    assert work.again == []
    assert work.acked == set(work.published)


# ---------------------------------------------------------------- what keeps them from starting


def test_what_a_worker_can_not_start_with_is_said_once_and_ends_all(tmp_path: Path, flags: Sequence[str]) -> None:
    """The port of the second worker for its peers is taken, while the first one could work."""
    ports = PortBlock(3).ports
    with socket.create_server(("127.0.0.1", ports[2])):
        peer_address = ("--peer-address", f"127.0.0.1:{ports[1]}")
        said = refused("--port", str(ports[0]), "--data-dir", str(tmp_path), *flags, *peer_address)
    assert f"127.0.0.1:{ports[2]}" in said
    assert "--peer-address" in said


def test_a_name_of_any_address_is_no_address_for_the_peers(tmp_path: Path, flags: Sequence[str]) -> None:
    ports = PortBlock(3).ports
    peer_address = ("--peer-address", f"0:{ports[1]}")
    said = refused("--port", str(ports[0]), "--data-dir", str(tmp_path), *flags, *peer_address)
    assert "--peer-address must be an address at which other proxies reach this one" in said


def test_a_broker_that_is_absent_is_said_once(tmp_path: Path, flags: Sequence[str]) -> None:
    nowhere = ("--amqp-url", "amqp://somebody:hunter2@127.0.0.1:1/")
    said = refused("--port", str(PortBlock().ports[0]), "--data-dir", str(tmp_path), *flags, *nowhere)
    assert "127.0.0.1:1" in said
    assert "hunter2" not in said


def test_a_port_that_is_taken_is_said_once_and_nothing_else_is_done(tmp_path: Path, flags: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = refused("--port", port, "--data-dir", str(tmp_path / "data"), *flags)
    assert f"port {port} on 127.0.0.1 is taken" in said
    assert not (tmp_path / "data").exists()


def refused(*arguments: str) -> str:
    """Return the one error line of two workers that can't start; the parent's exit code is that of one process."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
    own["POPGATE_SECRET"] = CLUSTER_SECRET
    command = popgate_command("serve", *arguments, "--workers", "2")
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    (line,) = [line for line in done.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert line.startswith("popgate: ")
    return line
