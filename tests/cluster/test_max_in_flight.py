"""A group's `max_in_flight` holds over all proxies, through all their faults, and no queue starves under it.

Judged by the clients' observations: a lease is certainly live from its answer until its settlement is sent, or until
its time is over, counted from when its pop was sent.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx
import pytest

from support.processes import wait_until
from support.proxy import ProxyProcess, plain_client
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

_log = logging.getLogger(__name__)

Json: TypeAlias = Any
QUEUES = 6
TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"
ADMIN = "/v1/admin/topics/t"
SPREAD_SECONDS = 20.0
FLOW_SECONDS = 30.0


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_server: RedisServer
) -> Iterator[ProxyCluster]:
    folder = tmp_path_factory.mktemp("max-in-flight")
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis_server, size=3) as cluster:
        cluster.add("--owns-queues", "false").start()
        yield cluster


@pytest.fixture
def cluster(shared: ProxyCluster) -> ProxyCluster:
    """Three proxies that own two queues of a new topic each, and a fourth that owns none."""
    for proxy in shared.proxies:
        proxy.start()
    client = shared.proxies[0].client
    assert client.delete(ADMIN).status_code in (204, 404)
    ok(client.put(ADMIN, json={"queues": QUEUES}))
    ok(client.put(f"{ADMIN}/groups/g", json={}))
    wait_until(lambda: is_spread(shared), timeout_seconds=SPREAD_SECONDS, what="queues to be spread evenly")
    return shared


def ok(response: httpx.Response) -> Json:
    assert response.is_success, response.text
    return response.json()


def owners(proxy: ProxyProcess) -> list[str | None]:
    """Return the owners of the queues in order, as this proxy sees it."""
    queues = ok(proxy.client.get("/v1/admin/cluster"))["queues"]
    return [one["owner"] for one in sorted(queues, key=lambda one: str(one["broker_queue"]))]


def is_spread(cluster: ProxyCluster) -> bool:
    views = [owners(proxy) for proxy in cluster.proxies if proxy.is_running()]
    counts = Counter(views[0])
    owning = sum(proxy.is_running() for proxy in cluster.proxies[:3])
    return all(view == views[0] for view in views) and None not in counts and len(counts) == owning


def limit(proxy: ProxyProcess, most: int | None) -> None:
    ok(proxy.client.put(f"{ADMIN}/groups/g", json={"max_in_flight": most}))


def publish(proxy: ProxyProcess, count: int, **fields: object) -> None:
    for first in range(0, count, 256):
        entries = [{"body": "x", **fields}] * min(256, count - first)
        results = ok(proxy.client.post(f"{TOPIC}/messages", json={"messages": entries}))["results"]
        assert {result["status"] for result in results} == {"published"}


def pop(proxy: ProxyProcess, **fields: object) -> list[Json] | None:
    """Pop; return the messages, or None if the limit refused it."""
    response = proxy.client.post(f"{GROUP}/pop", json=fields)
    if response.status_code == 429:
        assert response.json()["code"] == "too_many_in_flight"
        return None
    return list(ok(response)["messages"])


def pop_all(proxies: Sequence[ProxyProcess], count: int, **fields: object) -> list[Json]:
    """Pop through each proxy in turn."""
    messages: list[Json] = []
    turn = itertools.cycle(proxies)
    give_up_at = time.monotonic() + FLOW_SECONDS
    while len(messages) < count:
        assert time.monotonic() < give_up_at, f"{len(messages)} came, not {count}"
        messages += pop(next(turn), **{"max_messages": count - len(messages), "wait_seconds": 1, **fields}) or []
    return messages


def settle(client: httpx.Client, messages: Sequence[Json], verb: str = "ack") -> list[str]:
    handles = [message["receipt_handle"] for message in messages]
    body: Json = (
        {"receipt_handles": handles} if verb == "ack" else {"entries": [{"receipt_handle": one} for one in handles]}
    )
    return [result["status"] for result in ok(client.post(f"{GROUP}/{verb}", json=body))["results"]]


def ack(proxy: ProxyProcess, messages: Sequence[Json]) -> None:
    assert set(settle(proxy.client, messages)) == {"acked"}


def assert_full(proxies: Sequence[ProxyProcess]) -> None:
    assert [pop(proxy) for proxy in proxies] == [None] * len(proxies)


# -- what clients see -------------------------------------------------------------------------------------------------


class Witness:
    """The clients' observations. `spans`: when each lease was certainly live."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.acked: Counter[int] = Counter()
        """By queue."""
        self.problems: list[str] = []

    def most_at_once(self) -> int:
        begun = [(began, 1) for began, _ in self.spans]
        ended = [(end, -1) for _, end in self.spans]
        return max(itertools.accumulate(change for _, change in sorted([*ended, *begun])), default=0)


class Poller(threading.Thread):
    """Pops through one proxy and settles through another. It regularly releases a lease, and lets another one run
    out.
    """

    def __init__(
        self, witness: Witness, urls: Sequence[str], number: int, done: threading.Event, forgets_every: int
    ) -> None:
        super().__init__(name=f"poller {number}")
        self._witness = witness
        self._urls = urls
        self._number = number
        self._done = done
        self._forgets_every = forgets_every

    def run(self) -> None:
        clients = [plain_client(url, timeout_seconds=30) for url in self._urls]
        try:
            for turn in itertools.count(self._number):
                if self._done.is_set():
                    return
                settling = turn % len(clients)
                self._pop(clients[0], [*clients[settling:], *clients[:settling]], turn)
        except Exception as error:
            self._witness.problems.append(repr(error))
            raise
        finally:
            for client in clients:
                client.close()

    def _pop(self, popping: httpx.Client, settling: Sequence[httpx.Client], turn: int) -> None:
        asked = time.monotonic()
        seconds = 1
        try:
            response = popping.post(
                f"{GROUP}/pop",
                json={"max_messages": 1 + turn % 3, "wait_seconds": turn % 2, "invisibility_seconds": seconds},
            )
        except httpx.TransportError:  # a killed proxy
            self._done.wait(0.2)
            return
        answered = time.monotonic()
        if response.status_code in (429, 502, 503):
            self._done.wait(0.02)
            return
        messages = ok(response)["messages"]
        until = asked + seconds
        if messages and turn % self._forgets_every:
            time.sleep(0.01)
            until = min(until, time.monotonic())
            verb = "release" if turn % 10 == 1 else "ack"
            try:
                statuses = settle(settling[0], messages, verb)
            except httpx.TransportError:  # the same; only one is killed
                statuses = settle(settling[1], messages, verb)
            for message, status in zip(messages, statuses, strict=True):
                self._witness.acked[message["queue"]] += status in ("acked", "already_acked")
        self._witness.spans += [(answered, max(answered, until))] * len(messages)


@contextmanager
def pollers(proxies: Sequence[ProxyProcess], each: int, forgets_every: int = 20) -> Generator[Witness]:
    witness, done = Witness(), threading.Event()
    threads: list[Poller] = []
    for number in range(each * len(proxies)):
        at = number % len(proxies)
        urls = [proxy.url for proxy in (*proxies[at:], *proxies[:at])]
        threads.append(Poller(witness, urls, number, done, forgets_every))
    for thread in threads:
        thread.start()
    try:
        yield witness
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not witness.problems


# -- tests ------------------------------------------------------------------------------------------------------------


def test_no_more_are_leased_than_allowed_over_all_proxies_and_a_killed_one(cluster: ProxyCluster) -> None:
    limit(cluster.proxies[2], 5)
    publish(cluster.proxies[0], 400)
    with pollers(cluster.proxies, each=2) as witness:
        began = time.monotonic()
        wait_until(lambda: witness.acked.total() >= 200, timeout_seconds=FLOW_SECONDS, what="messages to flow")
        _log.info("200 acked in %.1f s", time.monotonic() - began)
        cluster.proxies[1].kill()
        wait_until(lambda: witness.acked.total() == 400, timeout_seconds=FLOW_SECONDS, what="all messages")
        _log.info("400 acked in %.1f s", time.monotonic() - began)
    assert witness.most_at_once() == 5, "never more, and no less than may be"


def test_leases_of_a_killed_proxy_count_until_they_end(cluster: ProxyCluster) -> None:
    victim, *others = cluster.proxies
    limit(victim, 4)
    publish(victim, 60)
    leased = pop_all([victim], 4, invisibility_seconds=30)
    victim.kill()
    wait_until(lambda: is_spread(cluster), timeout_seconds=SPREAD_SECONDS, what="an owner of all queues")
    assert_full(others)
    ack(others[0], leased[:3])
    again = pop_all(others, 3, invisibility_seconds=30)
    assert_full(others)
    ack(others[1], [leased[3], *again])
    assert len(pop_all(others, 4)) == 4
    assert_full(others)


def test_a_limit_is_set_raised_lowered_and_lifted_while_leases_live(cluster: ProxyCluster) -> None:
    one, two, three, front = cluster.proxies
    publish(one, 120)
    leased = pop_all([front], 30, invisibility_seconds=60)
    limit(one, 5)
    assert_full(cluster.proxies)
    ack(two, leased[:26])
    leased = leased[26:]
    leased += pop_all([front], 1, max_messages=10, invisibility_seconds=60)
    assert_full(cluster.proxies)
    limit(two, 8)
    leased += pop_all(cluster.proxies, 3, invisibility_seconds=60)
    assert_full(cluster.proxies)
    limit(three, 2)
    ack(front, leased[:6])
    assert_full(cluster.proxies)
    ack(one, leased[6:])
    leased = pop_all([two, front], 2, invisibility_seconds=60)
    assert_full(cluster.proxies)
    limit(front, None)
    leased += pop_all([front], 10, invisibility_seconds=60)
    ack(one, leased)


def test_a_loss_of_data_lets_nobody_lease_more(cluster: ProxyCluster, redis_server: RedisServer) -> None:
    front = cluster.proxies[3]
    limit(front, 4)
    publish(front, 60)
    leased = pop_all(cluster.proxies, 4, invisibility_seconds=60)
    redis_server.ask("DEL", *redis_server.ask("KEYS", f"popgate:{cluster.vhost}:*"))

    def is_full_again() -> bool:
        responses = [proxy.client.post(f"{GROUP}/pop", json={"max_messages": 5}) for proxy in cluster.proxies]
        assert [response.json()["messages"] for response in responses if response.is_success] == []
        return all(response.status_code == 429 for response in responses)

    wait_until(is_full_again, timeout_seconds=SPREAD_SECONDS, what="all leases to be known again")
    ack(front, leased[:2])
    assert len(pop_all(cluster.proxies, 2)) == 2
    assert_full(cluster.proxies)


@pytest.mark.parametrize("most", [1, 2])
def test_the_queues_of_every_owner_flow_under_a_small_limit(cluster: ProxyCluster, most: int) -> None:
    limit(cluster.proxies[0], most)
    publish(cluster.proxies[0], 900)
    queues = by_owner(cluster.proxies[0])
    assert len(queues) == 3
    with pollers(cluster.proxies[:3], each=1, forgets_every=100) as witness:
        wait_until(
            lambda: all(sum(witness.acked[queue] for queue in owned) >= 12 for owned in queues),
            timeout_seconds=FLOW_SECONDS,
            what="the queues of all owners to flow",
        )
    _log.info("acked: %s", witness.acked)
    assert witness.most_at_once() == most


def by_owner(proxy: ProxyProcess) -> list[list[int]]:
    views = owners(proxy)
    return [[queue for queue, one in enumerate(views) if one == owner] for owner in dict.fromkeys(views)]


def test_a_pop_that_waits_at_the_limit_is_served_in_time_and_bothers_nobody(cluster: ProxyCluster) -> None:
    *_, front = cluster.proxies
    limit(front, 1)
    assert pop(front) == []
    publish(front, 10)
    (leased,) = pop_all([front], 1, invisibility_seconds=60)
    before = asked(front)
    began = time.monotonic()
    assert pop(front, wait_seconds=2) is None
    assert time.monotonic() - began >= 1.9
    assert asked(front) - before <= 15, "three owners, each told that it is wanted, and asked some times"
    found: list[Json] = []
    waiting = threading.Thread(target=lambda: found.extend(pop(front, wait_seconds=20) or []))
    waiting.start()
    time.sleep(0.3)  # it is parked, and all owners know
    ack(front, [leased])
    began = time.monotonic()
    waiting.join()
    assert len(found) == 1
    assert time.monotonic() - began < 2.0


def asked(proxy: ProxyProcess) -> int:
    """Return how many messages and requests it has sent to the others."""
    members = ok(proxy.client.get("/v1/admin/cluster"))["members"]
    return sum(member["asked"] + member["passed_on"] for member in members)
