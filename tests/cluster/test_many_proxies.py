"""Several proxies, one service: queue ownership, what survives the loss of a proxy, and hand-over."""

import contextlib
import json
import logging
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pika
import pytest

from popgate.domain.names import queue_index
from support.answers import answer, bodies
from support.processes import wait_until
from support.proxy import ProxyProcess, plain_client
from support.proxy_cluster import ProxyCluster, instance, owners
from support.rabbitmq import RabbitNode
from support.redis import RedisServer
from support.rolling_load import RollingLoad

_log = logging.getLogger(__name__)

Json: TypeAlias = Any
SIZE = 3
QUEUES = 8
BALANCED_SECONDS = 5.0
HUNG_SECONDS = 12.0
IDLE_SECONDS = 6.0
DELETIONS = 5
TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_server: RedisServer
) -> Iterator[ProxyCluster]:
    folder = tmp_path_factory.mktemp("many-proxies")
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis_server, size=SIZE) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ProxyCluster) -> ProxyCluster:
    """All proxies run, and the one topic with its group is empty."""
    for proxy in shared.proxies:
        if proxy.is_running():
            proxy.resume()
        proxy.start()
    make_topic(shared, QUEUES)
    wait_until(lambda: is_balanced(shared), timeout_seconds=2 * HUNG_SECONDS, what="all proxies to own queues")
    return shared


def make_topic(cluster: ProxyCluster, queues: int) -> None:
    """Create the topic again."""
    client = cluster.proxies[0].client
    answer(client.delete("/v1/admin/topics/t"), 204, 404)
    answer(client.put("/v1/admin/topics/t", json={"queues": queues}), 201)
    answer(client.put("/v1/admin/topics/t/groups/g", json={"max_deliveries": 50}), 201)


def is_balanced(cluster: ProxyCluster) -> bool:
    """Tell whether all running proxies agree on owners, whose queue counts differ by at most one."""
    running = [proxy for proxy in cluster.proxies if proxy.is_running()]
    views = [owners(proxy) for proxy in running]
    members = {instance(proxy) for proxy in running}
    counts = Counter(views[0].values())
    agreed = all(view == views[0] for view in views) and set(counts) == members
    return agreed and max(counts.values()) - min(counts.values()) <= 1


def balanced_within(cluster: ProxyCluster, seconds: float) -> float:
    began = time.monotonic()
    wait_until(lambda: is_balanced(cluster), timeout_seconds=seconds, what="queues to be spread evenly")
    return time.monotonic() - began


def publish(proxy: ProxyProcess, *bodies: str, **fields: object) -> None:
    for first in range(0, len(bodies), 256):
        entries = [{"body": body, **fields} for body in bodies[first : first + 256]]
        results = answer(proxy.client.post(f"{TOPIC}/messages", json={"messages": entries}))["results"]
        assert {result["status"] for result in results} == {"published"}


def pop(proxy: ProxyProcess, **fields: object) -> list[Json]:
    return list(answer(proxy.client.post(f"{GROUP}/pop", json=fields))["messages"])


def pop_all(proxy: ProxyProcess, count: int, **fields: object) -> list[Json]:
    messages: list[Json] = []
    while len(messages) < count:
        more = pop(proxy, **{"max_messages": min(256, count - len(messages)), "wait_seconds": 5, **fields})
        assert more, f"{len(messages)} came, not {count}"
        messages += more
    assert len(messages) == count
    return messages


def ack(proxy: ProxyProcess, messages: Sequence[Json]) -> Counter[str]:
    statuses: Counter[str] = Counter()
    for first in range(0, len(messages), 256):
        handles = [message["receipt_handle"] for message in messages[first : first + 256]]
        results = answer(proxy.client.post(f"{GROUP}/ack", json={"receipt_handles": handles}))["results"]
        statuses.update(result["status"] for result in results)
    return statuses


# ---------------------------------------------------------------- owners


def test_queues_are_spread_evenly_with_the_fewest_moves_as_proxies_come_and_go(cluster: ProxyCluster) -> None:
    one, two, three = cluster.proxies
    before, dead = owners(one), instance(three)
    three.kill()
    taken = balanced_within(cluster, BALANCED_SECONDS)
    after = owners(one)
    assert {queue for queue in after if after[queue] != before[queue]} == {
        queue for queue, owner in before.items() if owner == dead
    }
    _log.info("after a kill: %.2f s", taken)
    three.start()
    _log.info("after a start: %.2f s", balanced_within(cluster, BALANCED_SECONDS))
    joined = owners(one)
    moved = {queue for queue in joined if joined[queue] != after[queue]}
    assert moved == {queue for queue, owner in joined.items() if owner == instance(three)}
    two.stop()
    _log.info("after a stop: %.2f s", balanced_within(cluster, BALANCED_SECONDS))


def test_a_proxy_that_owns_no_queues_serves_all_the_same(cluster: ProxyCluster) -> None:
    edge = cluster.add("--owns-queues", "false")
    with edge:
        publish(edge, *map(str, range(100)))
        messages = pop_all(edge, 100)
        assert sorted(bodies(messages), key=int) == [*map(str, range(100))]
        assert ack(edge, messages) == {"acked": 100}
        assert instance(edge) not in owners(edge).values()
    cluster.proxies.remove(edge)


# ---------------------------------------------------------------- leases


def test_leases_outlive_the_proxy_that_gave_them(cluster: ProxyCluster) -> None:
    victim, one, two = cluster.proxies
    publish(one, *map(str, range(300)))
    messages = pop_all(victim, 300, invisibility_seconds=30)
    assert ack(victim, messages[:100]) == {"acked": 100}
    victim.kill()
    entries = [
        {"receipt_handle": message["receipt_handle"], "invisibility_seconds": 60} for message in messages[100:200]
    ]
    extended = answer(one.client.post(f"{GROUP}/extend", json={"entries": entries}))["results"]
    assert {result["status"] for result in extended} == {"extended"}
    assert ack(two, messages[200:250]) == {"acked": 50}
    balanced_within(cluster, BALANCED_SECONDS)
    assert pop(one, max_messages=256, wait_seconds=2) == [], "all that is not acked is leased"
    released = [{"receipt_handle": message["receipt_handle"]} for message in messages[250:]]
    results = answer(one.client.post(f"{GROUP}/release", json={"entries": released}))["results"]
    assert {result["status"] for result in results} == {"released"}
    again = pop_all(two, 50, invisibility_seconds=30)
    assert sorted(bodies(again)) == sorted(bodies(messages[250:]))
    assert {message["delivery_count"] for message in again} == {2}
    assert ack(one, messages[100:200]) == {"acked": 100}
    assert ack(one, messages[200:250]) == {"already_acked": 50}
    assert ack(two, again) == {"acked": 50}
    assert pop(one, max_messages=256, wait_seconds=1) == []


def test_a_repeated_attempt_outlives_the_owner_and_waits_for_the_next_one(cluster: ProxyCluster) -> None:
    """A client's first retry after its proxy was killed."""
    victim, one, two = cluster.proxies
    publish(one, *map(str, range(120)))
    theirs = {place for place, owner in enumerate(owners(victim).values()) if owner == instance(victim)}
    attempts = {
        f"attempt-{number}": pop(victim, max_messages=5, attempt_id=f"attempt-{number}", invisibility_seconds=60)
        for number in range(24)
    }
    of_victim = {name for name, given in attempts.items() if theirs & {message["queue"] for message in given}}
    assert len(of_victim) > 4, "else nothing is tested"
    victim.kill()
    for number, name in enumerate(sorted(of_victim)):
        again = pop((one, two)[number % 2], max_messages=5, attempt_id=name)
        assert {message["receipt_handle"] for message in again} == {
            message["receipt_handle"] for message in attempts[name]
        }
    given = [message for messages in attempts.values() for message in messages]
    assert ack(one, given) == {"acked": len(given)}


def test_what_the_settling_proxy_did_not_live_to_tell_is_found_by_the_owner(cluster: ProxyCluster) -> None:
    """Messages of one key come one after the other: an owner that does not learn of the first ack blocks the others."""
    edge = cluster.add("--owns-queues", "false")
    with edge:
        publish(edge, "1", "2", ordering_key="k")
        (first,) = pop(edge, wait_seconds=2, invisibility_seconds=600)
        entries = [{"receipt_handle": first["receipt_handle"]}]
        edge.client.post(f"{GROUP}/release", json={"entries": entries})
        edge.kill()
    cluster.proxies.remove(edge)
    again = pop(cluster.proxies[0], max_messages=2, wait_seconds=5)
    assert bodies(again) == ["1", "2"]


def test_a_proxy_that_slept_while_it_was_overtaken_hands_out_nothing_that_is_leased(cluster: ProxyCluster) -> None:
    sleeper, one, two = cluster.proxies
    publish(one, *map(str, range(200)))
    pop(sleeper, max_messages=1, invisibility_seconds=1)  # it has a buffer
    sleeping = instance(sleeper)
    sleeper.pause()
    wait_until(
        lambda: sleeping not in owners(one).values() and None not in owners(one).values(),
        timeout_seconds=HUNG_SECONDS,
        what="others to own the queues of the sleeper",
    )
    # RabbitMQ redelivers what the sleeper consumed after it has missed its heartbeats.
    leased = pop_all(one, 200, invisibility_seconds=60, wait_seconds=20)
    assert len(set(bodies(leased))) == 200
    sleeper.resume()
    with plain_client(sleeper.url, timeout_seconds=30) as client:
        for _ in range(20):
            response = client.post(f"{GROUP}/pop", json={"max_messages": 256})
            assert response.status_code == 503 or response.json()["messages"] == [], "all are leased"
            time.sleep(0.05)
    assert ack(sleeper, leased[:100]) == {"acked": 100}
    assert ack(two, leased[100:]) == {"acked": 100}
    balanced_within(cluster, HUNG_SECONDS)
    assert pop(sleeper, max_messages=256, wait_seconds=1) == []


# ---------------------------------------------------------------- hand-over


@pytest.mark.parametrize("count", [500, 10_000])
def test_a_proxy_that_stops_hands_over_in_order_what_is_in_flight(cluster: ProxyCluster, count: int) -> None:
    """All in one queue: half of it is leased."""
    make_topic(cluster, 1)
    publish(cluster.proxies[0], *map(str, range(count)))
    owning = owners(cluster.proxies[0])["popgate:t:g:0"]
    (owner,) = [proxy for proxy in cluster.proxies if instance(proxy) == owning]
    others = [proxy for proxy in cluster.proxies if proxy is not owner]
    leased = pop_all(owner, count // 2, invisibility_seconds=120)
    assert bodies(leased) == [*map(str, range(count // 2))]
    heirs = [instance(proxy) for proxy in others]
    began = time.monotonic()
    stopping = threading.Thread(target=owner.stop)
    stopping.start()
    wait_until(
        lambda: owners(others[0])["popgate:t:g:0"] in heirs, timeout_seconds=10, what="the queue to change hands"
    )
    (first,) = pop(others[0], wait_seconds=10)
    took = time.monotonic() - began
    stopping.join()
    assert ack(others[1], leased) == {"acked": len(leased)}
    rest = [first, *pop_all(others[0], count - len(leased) - 1)]
    assert bodies(rest) == [*map(str, range(count // 2, count))]
    assert ack(others[0], rest) == {"acked": len(rest)}
    _log.info("%d in flight: handed over in %.2f s", count, took)
    assert took < (0.5 if count == 500 else 3.0) + SLACK_SECONDS


SLACK_SECONDS = 1.0
"""Extra seconds for the machine: one process ends, and two notice it."""


def test_a_rolling_restart_under_load_costs_no_error_and_no_duplicate(cluster: ProxyCluster) -> None:
    load = RollingLoad([proxy.url for proxy in cluster.proxies], topic="t", group="g")
    with load:
        for proxy in cluster.proxies:
            time.sleep(1)
            proxy.stop()
            proxy.start()
            balanced_within(cluster, HUNG_SECONDS)
        time.sleep(1)
    load.assert_kept()
    _log.info("%d messages over a rolling restart", len(load.published))


# ---------------------------------------------------------------- any proxy serves any client


@pytest.mark.parametrize("way", ["a proxy", "RabbitMQ"])
def test_a_long_poll_wakes_wherever_the_message_came_in(cluster: ProxyCluster, rabbitmq: RabbitNode, way: str) -> None:
    edge = cluster.add("--owns-queues", "false")
    one = cluster.proxies[0]
    waits: list[float] = []
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.amqp_url(cluster.vhost)))
    channel = connection.channel()
    with edge:
        pop(edge, wait_seconds=1)
        for number in range(10):
            came: list[float] = []
            waiting = threading.Thread(target=note_arrival, args=(edge, came))
            waiting.start()
            time.sleep(0.2)
            sent = time.monotonic()
            if way == "a proxy":
                publish(one, str(number))
            else:
                channel.basic_publish("popgate:t", str(number % QUEUES), b"straight")
            waiting.join()
            waits.append(came[0] - sent)
    cluster.proxies.remove(edge)
    connection.close()
    _log.info("woken after %.1f ms, %.1f at most", statistics.median(waits) * 1000, max(waits) * 1000)
    assert min(waits) < 0.05


FILTERS = 500
FILTERED_FACTOR_MAX = 10.0
"""Maximum slowdown; when each of the 500 filters was applied to each message, it took 50 times as long."""


def test_filters_parked_at_a_proxy_without_queues_hold_up_no_other_pop_there(cluster: ProxyCluster) -> None:
    one, edge = cluster.proxies[0], cluster.add("--owns-queues", "false")
    with edge, contextlib.ExitStack() as stack:
        pop(edge, wait_seconds=1)
        without = median_wait(one, edge)
        for number in range(FILTERS):
            waiting = stack.enter_context(socket.create_connection(("127.0.0.1", edge.port)))
            body = json.dumps({"wait_seconds": 30, "filter": {"kind": f"{number}"}})
            waiting.sendall(
                f"POST {GROUP}/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
        gauge = 'popgate_parked_pops{group="g",topic="t"} '
        wait_until(
            lambda: f"{gauge}{FILTERS}" in edge.client.get("/metrics").text, timeout_seconds=20, what="parked filters"
        )
        beside = median_wait(one, edge)
    cluster.proxies.remove(edge)
    _log.info("a pop gets its message after %.1f ms, beside filters after %.1f ms", 1000 * without, 1000 * beside)
    assert beside < FILTERED_FACTOR_MAX * without


def median_wait(publisher: ProxyProcess, edge: ProxyProcess) -> float:
    """Return the median seconds from a publish until a pop that waits at `edge` has the message."""
    waits: list[float] = []
    for number in range(7):
        came: list[float] = []
        waiting = threading.Thread(target=note_arrival, args=(edge, came))
        waiting.start()
        time.sleep(0.2)
        sent = time.monotonic()
        publish(publisher, str(number))
        waiting.join()
        waits.append(came[0] - sent)
    return statistics.median(waits)


def note_arrival(proxy: ProxyProcess, came: list[float]) -> None:
    (_,) = pop(proxy, wait_seconds=10)
    came.append(time.monotonic())


def test_idle_proxies_hardly_talk_to_each_other(cluster: ProxyCluster) -> None:
    time.sleep(1)
    before = [asked(proxy) for proxy in cluster.proxies]
    time.sleep(IDLE_SECONDS)
    sent = [after - first for after, first in zip(map(asked, cluster.proxies), before, strict=True)]
    assert max(sent) <= IDLE_SECONDS / 6 * 2


def asked(proxy: ProxyProcess) -> int:
    """Return how many messages and requests it has sent to the others."""
    members = answer(proxy.client.get("/v1/admin/cluster"))["members"]
    return sum(member["asked"] + member["passed_on"] for member in members)


def test_fewer_queues_are_refused_while_another_proxy_holds_their_messages(cluster: ProxyCluster) -> None:
    """They wait there for a retry: RabbitMQ counts none of them, nor does the proxy that changes the number."""
    one, two, _ = cluster.proxies
    mine = {int(queue.rsplit(":", 1)[1]) for queue, owner in owners(one).items() if owner == instance(two)} - {0}
    keys = [key for key in map(str, range(200)) if queue_index(key, QUEUES) in mine][:5]
    for key in keys:
        publish(one, key, ordering_key=key)
    entries = [
        {"receipt_handle": one["receipt_handle"], "delay_seconds": 3} for one in pop_all(two, len(keys), wait_seconds=5)
    ]
    answer(two.client.post(f"{GROUP}/release", json={"entries": entries}))
    answer(one.client.put("/v1/admin/topics/t", json={"queues": 1}), 409)
    messages = pop_all(one, len(keys), wait_seconds=10)
    assert sorted(bodies(messages)) == sorted(keys)
    ack(one, messages)

    def is_lowered() -> bool:
        return one.client.put("/v1/admin/topics/t", json={"queues": 1}).status_code == 200

    wait_until(is_lowered, timeout_seconds=20, what="the drained topic to get one queue")
    publish(two, "a", "b")
    assert sorted(bodies(pop_all(two, 2))) == ["a", "b"]


def test_deletions_do_not_disturb_what_other_proxies_do_with_the_rest(cluster: ProxyCluster) -> None:
    """RabbitMQ ends the connection of a proxy that uses a queue or an exchange while it is being deleted."""
    one, two, _ = cluster.proxies
    answer(one.client.put("/v1/locks/mine", json={"kind": "mutex"}), 200, 201)
    token = answer(two.client.post("/v1/locks/mine/acquire", json={"holder": "h", "ttl_seconds": 600}))["token"]
    uses = [
        ("/v1/topics/e/messages", {"messages": [{"body": "x" * 100}] * 20}),
        ("/v1/topics/e/groups/g/pop", {"wait_seconds": 0.1}),
        ("/v1/locks/e/acquire", {"holder": "h", "ttl_seconds": 5, "wait_seconds": 0.2}),
        (f"{TOPIC}/messages", {"messages": [{"body": "x"}] * 20}),
    ]
    failed: list[str] = []
    is_over = threading.Event()

    def use(path: str, request: Json) -> None:
        with plain_client(two.url, timeout_seconds=30) as client:
            while not is_over.is_set():
                reply = client.post(path, json=request)
                if path == f"{TOPIC}/messages":
                    failed.extend(str(result) for result in reply.json()["results"] if result["status"] != "published")

    threads = [threading.Thread(target=use, args=use_) for use_ in uses]
    for thread in threads:
        thread.start()
    for _ in range(DELETIONS):
        answer(one.client.put("/v1/admin/topics/e", json={"queues": 2}), 201)
        answer(one.client.put("/v1/admin/topics/e/groups/g"), 201)
        answer(one.client.put("/v1/locks/e", json={"kind": "mutex"}), 200, 201)
        time.sleep(0.05)
        answer(one.client.delete("/v1/admin/topics/e"), 204)
        answer(one.client.delete("/v1/locks/e"))
    is_over.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert "lost the connection" not in two.output
    answer(two.client.post("/v1/locks/mine/verify", json={"token": token}))


def test_the_cluster_is_shown_by_any_of_its_proxies(cluster: ProxyCluster) -> None:
    status = answer(cluster.proxies[0].client.get("/v1/admin/cluster"))
    assert status["instance"] in {member["instance"] for member in status["members"]}
    assert sum(member["queues"] for member in status["members"]) == len(status["queues"]) == QUEUES
    assert {member["protocol"]["max"] for member in status["members"]} == {1}
    assert status["protocol"] == 1
    assert status["moving"] == 0
