"""Quotas over HTTP: refused requests, the refusals, and that other requests succeed. Against a real server on each
broker.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, put, started_server
from popgate.journal.counters import OTHER
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

QUOTAS = {
    "topics_max": 3,
    "groups_per_topic_max": 2,
    "queues_max": 7,
    "locks_max": 2,
    "lease_groups_max": 2,
    "headers_max": 8,
    "headers_bytes_max": 2_048,
    "filter_bytes_max": 1_024,
    "metrics_groups_max": 2,
}
ARGUMENTS = [text for name, value in QUOTAS.items() for text in ("--" + name.replace("_", "-"), str(value))]
USED = ["--auto-create", "true", "--auto-create-queues", "2"]


@pytest.fixture(scope="module", params=["embedded", "front"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with started_server(request, tmp_path_factory.mktemp(f"quotas-{request.param}"), *USED, *ARGUMENTS) as server:
        yield server


@pytest.fixture
def server(started: HttpServer) -> Iterator[HttpServer]:
    """A server without any topic or lock."""
    yield started
    for topic in answer(started.client.get("/v1/admin/topics"))["topics"]:
        assert started.client.delete(f"/v1/admin/topics/{topic['topic']}").status_code in (200, 204)
    for lock in answer(started.client.get("/v1/locks"))["locks"]:
        assert started.client.delete(f"/v1/locks/{lock['name']}").status_code in (200, 204)


def topic(server: HttpServer, name: str, queues: int = 1) -> Topic:
    put(server.client, f"/v1/admin/topics/{name}", {"queues": queues})
    return Topic(server.client, name)


def group(of: Topic, name: str) -> None:
    put(of.client, f"{of.admin_path}/groups/{name}")


def is_refused(document: Json, setting: str) -> None:
    """Assert that the problem names the setting, the limit and the remedy."""
    assert document["setting"] == setting
    flag = "--" + setting.replace("_", "-")
    assert f"more than {QUOTAS[setting]} " in document["detail"]
    assert document["detail"].endswith(f"or raise {flag}")


# ---------------------------------------------------------------- what is created


def test_no_more_topics_are_created_than_the_quota_allows_and_all_others_are_served(server: HttpServer) -> None:
    first = topic(server, "t1")
    group(first, "default")
    topic(server, "t2")
    topic(server, "t3")
    refused = server.client.put("/v1/admin/topics/t4", json={"queues": 1})
    is_refused(problem(refused, 409, "quota_exceeded"), "topics_max")
    by_use = server.client.post("/v1/topics/t4/messages", json={"messages": [{"body": "a"}]})
    is_refused(problem(by_use, 409, "quota_exceeded"), "topics_max")
    problem(server.client.get("/v1/admin/topics/t4"), 404, "topic_not_found")
    put(server.client, first.admin_path, {"queues": 1})
    first.publish("a")
    assert first.ack(first.pop_one()) == ["acked"]
    server.client.delete("/v1/admin/topics/t2")
    topic(server, "t4")


def test_no_more_groups_of_a_topic_are_created_than_the_quota_allows(server: HttpServer) -> None:
    full, other = topic(server, "t1"), topic(server, "t2")
    group(full, "g1")
    group(full, "g2")
    refused = server.client.put(f"{full.admin_path}/groups/g3")
    is_refused(problem(refused, 409, "quota_exceeded"), "groups_per_topic_max")
    by_use = server.client.post(f"{full.path}/groups/g3/pop", json={})
    is_refused(problem(by_use, 409, "quota_exceeded"), "groups_per_topic_max")
    full.of("g1").policy(invisibility_seconds=5)
    group(other, "g3")


def test_no_more_queues_are_declared_than_the_quota_allows(server: HttpServer) -> None:
    wide, narrow = topic(server, "t1", queues=3), topic(server, "t2", queues=1)
    group(wide, "g1")
    group(wide, "g2")  # 6 queues
    refused = server.client.post("/v1/topics/t3/messages", json={"messages": [{"body": "a"}]})
    is_refused(problem(refused, 409, "quota_exceeded"), "queues_max")
    problem(server.client.get("/v1/admin/topics/t3"), 404, "topic_not_found")
    refused = server.client.put(wide.admin_path, json={"queues": 4})
    is_refused(problem(refused, 409, "quota_exceeded"), "queues_max")
    group(narrow, "g1")
    refused = server.client.put(f"{narrow.admin_path}/groups/g2")
    is_refused(problem(refused, 409, "quota_exceeded"), "queues_max")
    put(server.client, wide.admin_path, {"queues": 2})
    group(narrow, "g2")


def test_locks_that_are_made_at_the_same_time_keep_to_the_quota(server: HttpServer) -> None:
    def make(number: int) -> int:
        with httpx.Client(base_url=server.process.url, trust_env=False, verify=False) as client:
            return client.put(f"/v1/locks/m{number}", json={"kind": "semaphore", "slots": 1}).status_code

    with ThreadPoolExecutor(16) as threads:
        statuses = [*threads.map(make, range(64))]
    assert sorted(set(statuses)) == [200, 409]
    assert len(answer(server.client.get("/v1/locks"))["locks"]) == 2


def test_no_more_locks_exist_than_the_quota_allows(server: HttpServer) -> None:
    put(server.client, "/v1/locks/l1", {"kind": "semaphore", "slots": 1})
    acquire = {"holder": "h", "ttl_seconds": 30}
    assert answer(server.client.post("/v1/locks/l2/acquire", json=acquire))["acquired"]
    refused = server.client.put("/v1/locks/l3", json={"kind": "semaphore", "slots": 1})
    is_refused(problem(refused, 409, "quota_exceeded"), "locks_max")
    by_use = server.client.post("/v1/locks/l3/acquire", json=acquire)
    is_refused(problem(by_use, 409, "quota_exceeded"), "locks_max")
    put(server.client, "/v1/locks/l1", {"kind": "semaphore", "slots": 2})
    assert answer(server.client.post("/v1/locks/l1/acquire", json=acquire))["acquired"]
    server.client.delete("/v1/locks/l2")
    put(server.client, "/v1/locks/l3", {"kind": "semaphore", "slots": 1})


def test_a_lock_by_use_beyond_the_quota_leaves_no_queues_on_rabbitmq(rabbitmq: RabbitNode, tmp_path: Path) -> None:
    acquire = {"holder": "h", "ttl_seconds": 30}
    with (
        rabbitmq.own_vhost("quotas") as vhost,
        ProxyProcess(tmp_path, *USED, "--locks-max", "1", "--amqp-url", rabbitmq.amqp_url(vhost)) as proxy,
    ):
        assert answer(proxy.client.post("/v1/locks/first/acquire", json=acquire))["acquired"]
        problem(proxy.client.post("/v1/locks/further/acquire", json=acquire), 409, "quota_exceeded")
        queues = rabbitmq.ctl("list_queues", "--vhost", vhost, "name")
    assert "popgate:mutex:first:" in queues
    assert "further" not in queues


def test_no_more_lease_groups_wait_for_their_ack_than_the_quota_allows(server: HttpServer) -> None:
    of = topic(server, "t1")
    group(of, "default")
    of.publish("a", "b", "c")
    path = f"{of.group_path}/lease-groups/s"
    wanted = {"max_messages": 1}
    for epoch in (1, 2):
        assert answer(of.client.put(f"{path}/{epoch}", json=wanted))["count"] == 1
    is_refused(problem(of.client.put(f"{path}/3", json=wanted), 409, "quota_exceeded"), "lease_groups_max")
    assert answer(of.client.put(f"{path}/2", json=wanted))["existing"]
    answer(of.client.post(f"{path}/ack", json={"through_epoch": 1}))
    assert answer(of.client.put(f"{path}/3", json=wanted))["count"] == 1


# ---------------------------------------------------------------- what is sent


def test_the_headers_of_a_message_are_limited_in_number_and_in_size(server: HttpServer) -> None:
    of = topic(server, "t1")
    group(of, "default")

    def publish(headers: dict[str, str]) -> Json:
        messages = [{"body": "a"}, {"body": "b", "headers": headers}]
        return of.client.post(f"{of.path}/messages", json={"messages": messages})

    for headers, setting in (
        ({f"h{number}": "" for number in range(9)}, "headers_max"),
        ({"h": "x" * 2_048}, "headers_bytes_max"),
    ):
        document = problem(publish(headers), 413, "message_too_large")
        assert document["field"] == "messages[1].headers"
        assert document["detail"].endswith(f"or raise --{setting.replace('_', '-')}")
    answer(publish({f"h{number}": "" for number in range(8)}))
    answer(publish({"h": "x" * 2_047}))


def test_the_filter_of_a_pop_is_limited_in_size(server: HttpServer) -> None:
    of = topic(server, "t1")
    group(of, "default")
    refused = of.client.post(f"{of.group_path}/pop", json={"filter": {"h": ["x" * 1_000, "ä" * 12]}})
    document = problem(refused, 400, "invalid_request")
    assert document["field"] == "filter"
    assert document["detail"] == ("filter has more than 1 KiB in total: name fewer values, or raise --filter-bytes-max")
    assert of.pop(filter={"h": ["x" * 1_000, "ä" * 11]}) == []


# ---------------------------------------------------------------- what is shown


def test_the_metrics_have_rows_for_so_many_groups_and_one_for_all_others(server: HttpServer) -> None:
    for name in ("t1", "t2", "t3"):
        of = topic(server, name)
        for one in ("g1", "g2"):
            group(of, one)
        of.publish("a")
        for one in ("g1", "g2"):
            of.of(one).ack(of.of(one).pop_one())
    acked = 0.0
    for process in filter(None, (server.process, server.owner)):
        rows = rows_of(process)
        for family in ("popgate_ready_buffered", "popgate_parked_pops", "popgate_events_total"):
            shown = {labels for name, _, labels in rows if name == family}
            assert len(shown - {OTHER}) <= QUOTAS["metrics_groups_max"]
            if family != "popgate_events_total":
                assert OTHER in shown
        acked += sum(value for (_, kind, _), value in rows.items() if kind == "acked")
    assert acked == 6


def rows_of(process: ProxyProcess) -> dict[tuple[str, str, tuple[str, str]], float]:
    """Return the rows of groups, by (family, kind of event, (topic, group))."""
    rows: dict[tuple[str, str, tuple[str, str]], float] = {}
    for line in process.client.get("/metrics").text.splitlines():
        name, _, rest = line.partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', rest.rpartition("}")[0]))
        if "group" in labels:
            of = (labels["topic"], labels["group"] or "default")  # events of publishers have no group
            of = OTHER if of[0] == OTHER.topic else of
            rows[name, labels.get("kind", ""), of] = float(rest.rpartition("} ")[2])
    return rows


# ---------------------------------------------------------------- what is there


def test_what_exists_above_a_lowered_quota_goes_on_working(tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, *USED) as proxy:
        server = HttpServer(broker="embedded", process=proxy)
        for name in ("t1", "t2", "t3", "t4"):
            of = topic(server, name, queues=3)
            for one in ("g1", "g2", "g3"):
                group(of, one)
            of.publish("a")
        put(server.client, "/v1/locks/l1", {"kind": "semaphore", "slots": 1})
        put(server.client, "/v1/locks/l2", {"kind": "semaphore", "slots": 1})
        put(server.client, "/v1/locks/l3", {"kind": "semaphore", "slots": 1})
    with ProxyProcess(tmp_path, *USED, *ARGUMENTS) as proxy:
        server = HttpServer(broker="embedded", process=proxy)
        for name in ("t1", "t2", "t3", "t4"):
            for one in ("g1", "g2", "g3"):
                of = Topic(server.client, name, one)
                of.policy(invisibility_seconds=20)
                assert of.ack(of.pop_one()) == ["acked"]
        for name in ("l1", "l2", "l3"):
            acquire = {"holder": "h", "ttl_seconds": 30}
            assert answer(server.client.post(f"/v1/locks/{name}/acquire", json=acquire))["acquired"]
        put(server.client, "/v1/admin/topics/t1", {"queues": 2})
        is_refused(
            problem(server.client.put("/v1/admin/topics/t5", json={"queues": 1}), 409, "quota_exceeded"), "topics_max"
        )
