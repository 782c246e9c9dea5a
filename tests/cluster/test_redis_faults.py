"""Faults of Redis under a cluster: an absence costs only time, and lost data costs no message.

Here Redis writes to disk before it answers, as popgate recommends; `test_redis_state` tests the adapter alone.
"""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

import httpx
import pytest

from support.answers import answer, bodies
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster, owners
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

_log = logging.getLogger(__name__)

Json: TypeAlias = Any
SIZE = 3
QUEUES = 7
COUNT = 420
LEASE_SECONDS = 120
"""Seconds; longer than any test, so no lease runs out."""
BACK_SECONDS = 2.0
OUTAGE_SECONDS, OUTAGE_SECONDS_FULL = 5.0, 10.0
RESTORED_SECONDS = 5.0
GONE_SECONDS = 6.0
WATCH_SECONDS = 1.0
"""Seconds in which nothing more may come."""
BATCH = 100
TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"
ADMIN = "/v1/admin/topics/t"

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def redis_alone(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that a test may end. Depends on the shared one, which handles a missing installation."""
    with RedisServer(tmp_path_factory.mktemp("fragile-redis"), {"appendfsync": "always"}) as server:
        yield server


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_alone: RedisServer
) -> Iterator[ProxyCluster]:
    folder = tmp_path_factory.mktemp("redis-faults")
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis_alone, size=SIZE) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ProxyCluster, redis_alone: RedisServer) -> Iterator[ProxyCluster]:
    """All proxies run and are balanced, and the one topic is new. Afterwards their logs contain no unforeseen error."""
    redis_alone.start()
    client = shared.proxies[0].client
    wait_until(lambda: is_balanced(shared), timeout_seconds=30, what="all proxies to be members")
    answer(client.delete(ADMIN), 204, 404)
    answer(client.put(ADMIN, json={"queues": QUEUES}), 201)
    answer(client.put(f"{ADMIN}/groups/g", json={"max_deliveries": 50}), 201)
    wait_until(lambda: is_balanced(shared), timeout_seconds=30, what="all proxies to own queues")
    yield shared
    for proxy in shared.proxies:
        assert proxy.is_running()
        log = (proxy.folder / "output.log").read_text(errors="replace")
        at = log.find("Traceback")
        assert at < 0, log[max(0, at - 500) : at + 4000]


# ---------------------------------------------------------------- words for the tests


def seen(proxy: ProxyProcess) -> Json:
    return answer(proxy.client.get("/v1/admin/cluster"))


def members(proxy: ProxyProcess) -> set[str]:
    return {one["instance"] for one in seen(proxy)["members"]}


def is_balanced(cluster: ProxyCluster) -> bool:
    """Tell whether all proxies know one another, and agree on owners."""
    names = {seen(proxy)["instance"] for proxy in cluster.proxies}
    views = [owners(proxy) for proxy in cluster.proxies]
    return (
        all(members(proxy) == names for proxy in cluster.proxies)
        and all(view == views[0] for view in views)
        and set(views[0].values()) <= names
        and (not views[0] or set(views[0].values()) == names)
    )


def publish(proxy: ProxyProcess, bodies: Sequence[str]) -> None:
    for first in range(0, len(bodies), BATCH):
        entries = [{"body": body} for body in bodies[first : first + BATCH]]
        results = answer(proxy.client.post(f"{TOPIC}/messages", json={"messages": entries}))["results"]
        assert {result["status"] for result in results} == {"published"}


def pop(proxy: ProxyProcess, count: int = BATCH, wait_seconds: float = 0.0, **fields: object) -> list[Json]:
    request = {"max_messages": count, "wait_seconds": wait_seconds, "invisibility_seconds": LEASE_SECONDS, **fields}
    return list(answer(proxy.client.post(f"{GROUP}/pop", json=request))["messages"])


def settle(proxy: ProxyProcess, messages: Sequence[Json], verb: str = "ack") -> Counter[str]:
    handles = [message["receipt_handle"] for message in messages]
    body: Json = {"receipt_handles": handles}
    if verb != "ack":
        body = {"entries": [{"receipt_handle": handle} for handle in handles]}
    results = answer(proxy.client.post(f"{GROUP}/{verb}", json=body))["results"]
    return Counter(result["status"] for result in results)


def drained(
    cluster: ProxyCluster, count: int, *, seconds: float = 30.0, watch_seconds: float = WATCH_SECONDS
) -> list[str]:
    """Pop and ack through all proxies in turn until `count` messages have come, and for a few seconds more; return
    everything.
    """
    came: list[str] = []

    def take(number: int, wait_seconds: float) -> bool:
        messages = pop(cluster.proxies[number % SIZE], wait_seconds=wait_seconds)
        came.extend(bodies(messages))
        if messages:
            assert settle(cluster.proxies[(number + 1) % SIZE], messages) == {"acked": len(messages)}
        return bool(messages)

    deadline = time.monotonic() + seconds
    number = 0
    while len(came) < count and time.monotonic() < deadline:
        number += 1
        take(number, 1.0)
    with ThreadPoolExecutor(SIZE) as pool:
        while any(pool.map(take, range(SIZE), [watch_seconds] * SIZE)) and time.monotonic() < deadline:
            pass
    return came


def in_flight(cluster: ProxyCluster) -> tuple[list[Json], list[str], list[str]]:
    """Publish COUNT messages; return the leased ones, the acked ones and the waiting ones."""
    everything = [f"m{number}" for number in range(COUNT)]
    publish(cluster.proxies[0], everything)
    leased: list[Json] = []
    acked: list[str] = []
    for number, proxy in enumerate(cluster.proxies):
        messages = pop(proxy, 40, wait_seconds=5.0)
        assert messages
        half = len(messages) // 2
        assert settle(cluster.proxies[(number + 1) % SIZE], messages[:half]) == {"acked": half}
        acked += bodies(messages[:half])
        leased += messages[half:]
    rest = {*everything} - {*acked} - {*bodies(leased)}
    return leased, acked, sorted(rest)


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert response.json()["code"] == "state_unavailable"
    assert int(response.headers["retry-after"]) >= 1


def assert_only_publishes(cluster: ProxyCluster, lease: Json, name: str) -> list[str]:
    """Check the answers while Redis is away; return what was published meanwhile."""
    published: list[str] = []

    def ask(proxy: ProxyProcess) -> None:
        # Requests sent before the connection broke, or that waited for it, may take as long as the time limit for
        # Redis' answers. Redis may later carry out requests that it got while it hung: leases that no client learns of
        # must not stay.
        asked = {"max_messages": 5, "wait_seconds": 1, "invisibility_seconds": LEASE_SECONDS}
        assert_refused(proxy.client.post(f"{GROUP}/pop", json=asked))
        assert_refused(proxy.client.post(f"{GROUP}/ack", json={"receipt_handles": [lease["receipt_handle"]]}))
        entry = {"receipt_handle": lease["receipt_handle"], "invisibility_seconds": LEASE_SECONDS}
        assert_refused(proxy.client.post(f"{GROUP}/extend", json={"entries": [entry]}))
        publish(proxy, [f"{name}-{proxy.name}"])
        published.append(f"{name}-{proxy.name}")
        assert not proxy.client.get("/readyz").is_success
        assert proxy.client.get("/healthz").is_success

    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(ask, cluster.proxies))
    return published


def back_within(cluster: ProxyCluster, since: float) -> list[Json]:
    """Return when each proxy has handed out a message again, with these messages."""
    given: list[Json] = []

    def again(proxy: ProxyProcess) -> None:
        def gives() -> bool:
            response = proxy.client.post(
                f"{GROUP}/pop", json={"max_messages": 1, "invisibility_seconds": LEASE_SECONDS}
            )
            if response.status_code == 503:
                assert response.json()["code"] in ("state_unavailable", "peer_unavailable"), response.text
                return False
            given.extend(answer(response)["messages"])
            return bool(response.json()["messages"])

        wait_until(gives, timeout_seconds=30, what=f"{proxy.name} to give out messages")

    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(again, cluster.proxies))
    took = time.monotonic() - since
    _log.info("back after %.2f s", took)
    print(f"\nback after {took:.2f} s")  # noqa: T201 - the result
    assert took < BACK_SECONDS
    return given


def restart(server: RedisServer, how: str, pause: Callable[[], None]) -> None:
    """End Redis, do `pause`, and start it again."""
    if how == "hang":
        server.pause()
        pause()
        server.resume()
        return
    server.kill() if how == "kill" else server.stop()
    pause()
    server.start()


# ---------------------------------------------------------------- it keeps its data


@pytest.mark.parametrize("how", ["stop", "kill", "outage", "hang"])
def test_an_absence_of_redis_costs_time_and_nothing_else(
    cluster: ProxyCluster, redis_alone: RedisServer, full_run: bool, how: str
) -> None:
    leased, acked, rest = in_flight(cluster)
    before = owners(cluster.proxies[0])
    seconds = (OUTAGE_SECONDS_FULL if full_run else OUTAGE_SECONDS) if how in ("outage", "hang") else 0.0
    published: list[str] = []

    def pause() -> None:
        until = time.monotonic() + seconds
        if seconds:
            published.extend(assert_only_publishes(cluster, leased[0], how))
        while time.monotonic() < until:
            publish(cluster.proxies[0], [f"{how}-{len(published)}"])
            published.append(f"{how}-{len(published)}")
            time.sleep(0.1)

    restart(redis_alone, how, pause)
    back_at = time.monotonic()
    given = back_within(cluster, back_at)
    assert settle(cluster.proxies[1], leased[::2]) == {"acked": len(leased[::2])}
    assert settle(cluster.proxies[2], leased[1::2]) == {"acked": len(leased[1::2])}
    assert settle(cluster.proxies[0], given) == {"acked": len(given)}
    left = {*rest, *published} - {*bodies(given)}
    # Up to the time after which a proxy without heartbeats would be considered dead.
    watch_seconds = max(WATCH_SECONDS, back_at + GONE_SECONDS - time.monotonic()) if seconds else WATCH_SECONDS
    came = drained(cluster, len(left), watch_seconds=watch_seconds)
    assert Counter(came) == Counter(left), "each once, and nothing that was acked"
    for proxy in cluster.proxies:
        assert owners(proxy) == before
    assert not {*came} & {*acked}


# ---------------------------------------------------------------- it loses its data


def epochs(cluster: ProxyCluster, server: RedisServer) -> dict[str, int]:
    """Return the epochs of all claimed queues, dead letters excluded."""
    found: Json = server.ask("HGETALL", f"popgate:{cluster.vhost}:claims")
    return {name.decode(): int(epoch) for name, epoch in found.items() if not name.endswith(b":dead")}


def lose_data(server: RedisServer, how: str) -> None:
    if how == "flush":
        server.ask("FLUSHALL")
        return
    server.kill()
    for folder in server.folder.glob("appendonlydir*"):
        shutil.rmtree(folder)
    server.start()


@pytest.mark.parametrize("how", ["flush", "empty"])
def test_lost_data_are_written_back_by_those_who_know(
    cluster: ProxyCluster, redis_alone: RedisServer, how: str
) -> None:
    leased, acked, rest = in_flight(cluster)
    released, leased = leased[:9], leased[9:]
    assert settle(cluster.proxies[0], released, "release") == {"released": 9}
    before, epochs_before = owners(cluster.proxies[0]), epochs(cluster, redis_alone)
    answer(cluster.proxies[1].client.put("/v1/locks/bills", json={"kind": "semaphore", "slots": 3}), 200, 201)
    lose_data(redis_alone, how)
    began = time.monotonic()
    given = back_within(cluster, began)
    wait_until(lambda: is_balanced(cluster), timeout_seconds=RESTORED_SECONDS, what="all to be members again")
    _log.info("members again after %.2f s", time.monotonic() - began)
    print(f"members again after {time.monotonic() - began:.2f} s")  # noqa: T201 - the result
    assert {queue for queue, owner in owners(cluster.proxies[0]).items() if owner != before[queue]} == set()
    epochs_after = epochs(cluster, redis_alone)
    for queue in before:
        assert epochs_after[queue] > epochs_before[queue]
    for number, proxy in enumerate(cluster.proxies):
        mine = leased[number::SIZE]
        assert settle(proxy, mine) == {"acked": len(mine)}, "leases are good as before"
    assert settle(cluster.proxies[0], given) == {"acked": len(given)}
    left = {*rest, *bodies(released)} - {*bodies(given)}
    came = drained(cluster, len(left))
    assert Counter(came) == Counter(left), "each once, and nothing that was acked"
    late = cluster.add()
    with late:
        publish(late, ["late"])
        (message,) = pop(late, wait_seconds=5.0)
        assert message["body"] == "late"
        assert settle(late, [message]) == {"acked": 1}
        lock = answer(late.client.get("/v1/locks/bills"))
        assert lock["slots"] == 3
        late.stop()
    cluster.proxies.remove(late)
    assert not {*came} & {*acked}


def test_a_drain_goes_on_after_a_loss_and_cuts_off_nothing(cluster: ProxyCluster, redis_alone: RedisServer) -> None:
    mode = f"{ADMIN}/groups/g/consume-mode"
    leased, acked, rest = in_flight(cluster)
    answer(cluster.proxies[0].client.put(mode, json={"mode": "pull", "drain_timeout_seconds": 100}))
    lose_data(redis_alone, "flush")

    def is_known(*names: str) -> bool:
        responses = [proxy.client.get(mode) for proxy in cluster.proxies]
        return all(one.is_success and one.json()["mode"] in names for one in responses)

    wait_until(lambda: is_known("draining"), timeout_seconds=20, what="the drain to be known again")
    wait_until(lambda: is_balanced(cluster), timeout_seconds=20, what="all to be members again")
    for proxy in cluster.proxies:
        response = proxy.client.post(f"{GROUP}/pop", json={})
        assert (response.status_code, response.json().get("mode")) == (409, "draining"), response.text
    assert settle(cluster.proxies[1], leased) == {"acked": len(leased)}, "none of them is cut off"
    wait_until(lambda: is_known("pull"), timeout_seconds=20, what="the end of the drain")
    answer(cluster.proxies[2].client.put(mode, json={"mode": "pop"}))
    came = drained(cluster, len(rest))
    assert Counter(came) == Counter(rest), "each once, and nothing that was acked"
    assert not {*came} & {*acked}


def test_pull_clients_go_on_after_a_loss_and_nothing_is_lost_or_done_twice(
    cluster: ProxyCluster, redis_alone: RedisServer
) -> None:
    client, mode = cluster.proxies[0].client, f"{ADMIN}/groups/g/consume-mode"
    answer(client.put(mode, json={"mode": "pull", "drain_timeout_seconds": 0}))
    wait_until(lambda: answer(client.get(mode))["converged"], timeout_seconds=20, what="pull mode")
    told: Json = {}

    def ask() -> bool:
        nonlocal told
        shown = {"generation": told["generation"]} if told else {}
        response = client.post(f"{GROUP}/assignment", json={"client_id": "a", "supports": ["pull"], **shown})
        told = response.json() if response.is_success else told
        return response.is_success and len(told["queues"]) == QUEUES

    def on_queue(verb: str, queue: int, **fields: object) -> httpx.Response:
        body = {"client_id": "a", "generation": told["generation"], **fields}
        return client.post(f"{GROUP}/queues/{queue}/{verb}", json=body)

    def pull(queue: int) -> list[Json]:
        return list(answer(on_queue("pull", queue, max_messages=256, wait_seconds=2))["messages"])

    assert ask()
    publish(cluster.proxies[1], [f"{number:03}" for number in range(COUNT)])
    had = {queue: pull(queue) for queue in range(QUEUES)}
    committed: set[str] = set()
    for queue, messages in had.items():
        done = messages[: len(messages) // 2]
        assert answer(on_queue("commit", queue, receipt_handle=done[-1]["receipt_handle"])) == {"committed": len(done)}
        committed |= {*bodies(done)}
    before = told["generation"]
    lose_data(redis_alone, "flush")
    handle = had[0][-1]["receipt_handle"]
    wait_until(
        lambda: ask() and on_queue("commit", 0, receipt_handle=handle).is_success,
        timeout_seconds=20,
        what="a commit under the session as it was",
    )
    assert told["generation"] == before
    committed |= {*bodies(had[0])}

    def rest(queue: int) -> list[str]:
        found: list[str] = []
        while messages := _patiently(lambda: on_queue("pull", queue, max_messages=256, wait_seconds=0.2)):
            assert bodies(messages) == sorted(bodies(messages))
            found += bodies(messages)
            answer(on_queue("commit", queue, receipt_handle=messages[-1]["receipt_handle"]))
            ask()
        return found

    left = [body for queue in range(QUEUES) for body in rest(queue)]
    assert not {*left} & committed
    assert sorted([*left, *committed]) == [f"{number:03}" for number in range(COUNT)], "each once, and none is lost"


def _patiently(ask: Callable[[], httpx.Response]) -> list[Json]:
    """Return the messages of a pull, retrying until Redis has the data."""
    deadline = time.monotonic() + 20.0
    while (response := ask()).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.2)
    return list(answer(response)["messages"])


# ---------------------------------------------------------------- another program writes to it


STRANGER = '["https://127.0.0.1:1",[99,99],true]'
"""The entry of a member that speaks other versions of the peer protocol."""


class Writer:
    """A program that writes to the cluster's keys. ``close`` takes back what it has put into hashes."""

    def __init__(self, cluster: ProxyCluster, redis: RedisServer) -> None:
        self._redis, self._prefix = redis, f"popgate:{cluster.vhost}:"
        self._written: list[tuple[str, str]] = []

    def put(self, key: str, field: str, value: str) -> None:
        self._written.append((key, field))
        self.ask("HSET", key, field, value)

    def close(self) -> None:
        for key, field in self._written:
            self.ask("HDEL", key, field)
        self.announce("view", "changes")
        self.announce("catalog", "catalog_changes")

    def ask(self, command: str, key: str, *words: str) -> Any:
        return self._redis.ask(command, self._prefix + key, *words)

    def announce(self, version: str, channel: str) -> None:
        self.ask("INCR", version)
        self.ask("PUBLISH", channel, "x")

    def change_members(self, *, owners: Sequence[str] = (), **members: str) -> None:
        """Write members; the ``owners`` among them own all queues, in turn."""
        for name, says in members.items():
            self.put("members", name, says)
        if owners:
            for queue, owner in zip(self.ask("HKEYS", "owners"), cycle(owners), strict=False):
                self.ask("HSET", "owners", queue.decode(), owner)
        self.announce("view", "changes")


@pytest.fixture
def writer(cluster: ProxyCluster, redis_alone: RedisServer) -> Iterator[Writer]:
    writer = Writer(cluster, redis_alone)
    yield writer
    writer.close()


def test_entries_of_the_catalog_beyond_all_bounds_are_ignored(cluster: ProxyCluster, writer: Writer) -> None:
    group = writer.ask("HGET", "topic_groups", "t/g").decode()
    for name, spec in (("big", '{"queue_count":2000}'), ("less", '{"queue_count":-1}'), ('no"\nname', "{}")):
        writer.put("topics", name, spec)
        writer.put("topic_groups", f"{name}/default", group)
    writer.put("topic_groups", "nowhere/default", group)
    writer.put("topic_groups", "t/bad", '{"policy":{"retry":{"multiplier":0}}}')
    writer.announce("catalog", "catalog_changes")
    client = cluster.proxies[0].client
    for name in ("one", "other"):
        answer(client.put(f"/v1/admin/topics/{name}", json={"queues": 1}), 201)

    def shown(proxy: ProxyProcess) -> list[tuple[str, list[str]]]:
        topics = answer(proxy.client.get("/v1/admin/topics"))["topics"]
        return sorted((one["topic"], one["groups"]) for one in topics)

    good: list[tuple[str, list[str]]] = [("one", []), ("other", []), ("t", ["g"])]

    def shows(proxy: ProxyProcess) -> bool:
        return shown(proxy) == good

    for proxy in cluster.proxies:
        wait_until(partial(shows, proxy), timeout_seconds=20, what="the others to be there")
        for entry in ("topic big", "topic less", "group bad of topic t", "group default of topic nowhere"):
            assert proxy.output.count(f"entry='{entry}'") == 1
    publish(cluster.proxies[1], ["m"])
    assert drained(cluster, 1) == ["m"]
    cluster.proxies[2].restart()
    assert shown(cluster.proxies[2]) == good
    for name in ("one", "other"):
        answer(client.delete(f"/v1/admin/topics/{name}"), 204)


UNREACHABLE = (
    '["https://' + "a" * 70 + '.example:1",[1,1],true]',
    '["https://a\\u0000b:1",[1,1],true]',
    '["https://[::1",[1,1],true]',
    "[5,[1,1],true]",
    "not json",
    "5",
)
"""Entries of members, all wrong in different ways."""


def test_members_that_can_not_be_reached_are_no_error_and_are_soon_gone(cluster: ProxyCluster, writer: Writer) -> None:
    """Each of them owns a queue, so that every pop asks all of them."""
    evil = {f"evil{number}": says for number, says in enumerate(UNREACHABLE)}

    def sees_owners(proxy: ProxyProcess) -> bool:
        return set(owners(proxy).values()) == {*evil}

    writer.change_members(owners=[*evil], **evil)
    for proxy in cluster.proxies:
        wait_until(partial(sees_owners, proxy), timeout_seconds=5, what="the owners to be seen")
        assert proxy.client.get(GROUP).status_code in (200, 503)
        assert proxy.client.post(f"{GROUP}/pop", json={"wait_seconds": 0}).status_code in (200, 503)
    wait_until(lambda: is_balanced(cluster), timeout_seconds=GONE_SECONDS + 10, what="the members to be gone")
    publish(cluster.proxies[0], ["m"])
    assert drained(cluster, 1) == ["m"]


def test_no_proxy_ends_because_of_a_member_of_another_version(cluster: ProxyCluster, writer: Writer) -> None:
    publish(cluster.proxies[0], ["m"])
    for member in writer.ask("HKEYS", "members"):
        writer.ask("HDEL", "members", member.decode())
    writer.ask("ZADD", "beats", str(2**52), "evil")
    writer.change_members(evil=STRANGER)
    for proxy in cluster.proxies:
        wait_until(partial(is_unready, proxy), timeout_seconds=GONE_SECONDS, what="a proxy not to be ready")
        assert proxy.client.get("/readyz").json()["code"] == "not_ready"
        assert "ERROR" in proxy.output
    wait_until(
        lambda: all(map(is_ready, cluster.proxies)), timeout_seconds=GONE_SECONDS + 10, what="all to be ready again"
    )
    wait_until(lambda: is_balanced(cluster), timeout_seconds=20, what="all to own queues again")
    assert drained(cluster, 1) == ["m"]


def test_a_proxy_starts_when_a_member_of_another_version_is_silent(cluster: ProxyCluster, writer: Writer) -> None:
    new = cluster.add()
    cluster.proxies.remove(new)
    try:
        writer.ask("ZADD", "beats", str(2**52), "evil")
        writer.change_members(evil=STRANGER)
        new.start()
        assert is_ready(new)
        assert all(map(is_ready, cluster.proxies))
        assert not writer.ask("HEXISTS", "members", "evil")
    finally:
        new.close()
    wait_until(lambda: is_balanced(cluster), timeout_seconds=20, what="the queues to be balanced again")


def is_ready(proxy: ProxyProcess) -> bool:
    return proxy.client.get("/readyz").is_success


def is_unready(proxy: ProxyProcess) -> bool:
    return not is_ready(proxy)
