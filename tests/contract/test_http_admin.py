"""Topics and groups over HTTP (decision 1)."""

import json
import re
from typing import Any

import pytest

from contract.http_server import HttpServer, Topic, answer, problem, put, server
from popgate.adapters.replicas.proxy_groups import ProxyReplicaGroups
from popgate.domain.errors import PeerUnavailable

__all__ = ["server"]

DEFAULT_POLICY = {
    "invisibility_seconds": 30,
    "max_lease_seconds": 43_200,
    "max_deliveries": 16,
    "retry": {"initial_seconds": 0, "multiplier": 2, "max_seconds": 600},
    "max_in_flight": None,
    "paused": False,
    "min_replicas": None,
}


def test_a_topic_is_created_read_listed_and_deleted(server: HttpServer) -> None:
    client = server.client
    created = client.put("/v1/admin/topics/crud", json={"queues": 3})
    assert created.status_code == 201
    wanted: dict[str, Any] = {
        "topic": "crud",
        "queues": 3,
        "adopted": [],
        "unique_message_ids": False,
        "groups": [],
        "warnings": [],
    }
    assert created.json() == wanted
    again = client.put("/v1/admin/topics/crud", json={"queues": 3})
    assert (again.status_code, again.json()) == (200, wanted)
    assert client.put("/v1/admin/topics/crud/groups/g").status_code == 201
    wanted["groups"] = ["g"]
    assert answer(client.get("/v1/admin/topics/crud")) == wanted
    assert wanted in answer(client.get("/v1/admin/topics"))["topics"]
    deleted = client.delete("/v1/admin/topics/crud")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert 'topic="crud"' not in client.get("/metrics").text
    problem(client.get("/v1/admin/topics/crud"), 404, "topic_not_found")
    problem(client.get("/v1/topics/crud/groups/g"), 404, "topic_not_found")


def test_a_group_is_created_read_and_deleted_with_its_messages(topic: Topic) -> None:
    client, path = topic.client, f"{topic.admin_path}/groups/g"
    created = client.put(path)
    assert created.status_code == 201
    wanted: dict[str, Any] = {
        "topic": topic.name,
        "group": "g",
        "mode": "pop",
        "policy": DEFAULT_POLICY,
        "warnings": [],
    }
    assert created.json() == wanted
    assert answer(client.get(path)) == wanted
    topic.publish("x")
    assert client.delete(path).status_code == 204
    problem(client.get(path), 404, "group_not_found")
    put(client, path)
    assert topic.of("g").pop(wait_seconds=0.3) == [], "its messages went with it"
    assert topic.pop_one()["body"] == "x", "and only its own"


def test_a_group_says_how_many_replicas_its_queues_are_to_have(server: HttpServer, topic: Topic) -> None:
    client, path = topic.client, f"{topic.admin_path}/groups/billing"
    on_rabbitmq = answer(client.get("/v1"))["broker"] == "rabbitmq"

    def asking() -> list[dict[str, Any]]:
        told = answer(client.get("/v1/admin/replicas/groups"))
        assert (told["vhost"] is not None) is on_rabbitmq
        return [row for row in told["groups"] if row["topic"] == topic.name]

    put(client, path)
    assert asking() == []
    for number in (5, 0, 2.0):
        changed = put(client, path, {"min_replicas": number})
        assert changed["policy"] == {**DEFAULT_POLICY, "min_replicas": number}
        assert bool(changed["warnings"]) is not on_rabbitmq
        assert topic.of("billing").state()["policy"]["min_replicas"] == number
        (row,) = asking()
        assert (row["group"], row["min_replicas"]) == ("billing", number)
        assert f"popgate:{topic.name}:billing:0" in row["queues"]
        assert f"popgate:{topic.name}:billing:dead" in row["queues"]
    kept = put(client, path, {"max_in_flight": 9})
    assert (kept["policy"]["min_replicas"], kept["warnings"]) == (2, [])
    assert put(client, path, {"min_replicas": None})["policy"]["min_replicas"] is None
    assert asking() == []


async def test_a_keeper_outside_is_told_by_the_first_proxy_that_answers(server: HttpServer) -> None:
    topic = server.topic("billing", "audit", queues=2)
    topic.of("billing").policy(min_replicas=5)
    groups = ProxyReplicaGroups(["http://127.0.0.1:1", server.process.url], server.vhost, None)
    if server.broker == "embedded":
        with pytest.raises(PeerUnavailable, match="has no RabbitMQ, and the queues are in") as raised:
            await groups.asking()
        assert "omit --groups-url" in raised.value.detail
    else:
        (told,) = [one for one in await groups.asking() if one.group.topic == topic.name]
        assert (told.group.group, told.replicas) == ("billing", 5)
        assert list(told.queues) == [f"popgate:{topic.name}:billing:{one}" for one in (0, 1, "dead")]
    await groups.close()
    strangers = ProxyReplicaGroups([server.process.url], "elsewhere", None)
    with pytest.raises(PeerUnavailable, match="and the queues are in 'elsewhere'"):
        await strangers.asking()
    await strangers.close()


def test_a_group_is_paused_and_resumed(topic: Topic) -> None:
    client, path = topic.client, f"{topic.admin_path}/groups/default"
    put(client, path, {"max_in_flight": 7})
    for action, paused in (("pause", True), ("pause", True), ("resume", False), ("resume", False)):
        policy = answer(client.post(f"{path}/{action}"))["policy"]
        assert policy == {**DEFAULT_POLICY, "max_in_flight": 7, "paused": paused}
        assert topic.state()["policy"] == policy
    problem(client.post(f"{topic.admin_path}/groups/none/pause"), 404, "group_not_found")


def test_a_policy_changes_where_it_is_named_and_stays_otherwise(topic: Topic) -> None:
    client, path = topic.client, f"{topic.admin_path}/groups/default"
    changed = put(client, path, {"max_deliveries": None, "retry": {"initial_seconds": 1.5}})
    wanted: dict[str, Any] = {**DEFAULT_POLICY, "max_deliveries": None}
    wanted["retry"] = {"initial_seconds": 1.5, "multiplier": 2, "max_seconds": 600}
    assert changed["policy"] == wanted
    changed = put(client, path, {"invisibility_seconds": 43_200, "retry": {"max_seconds": 90}})
    wanted["invisibility_seconds"] = 43_200
    wanted["retry"]["max_seconds"] = 90
    assert changed["policy"] == wanted
    assert put(client, path)["policy"] == wanted
    assert put(client, path, {})["policy"] == wanted
    assert answer(client.get(path))["policy"] == wanted
    assert topic.state()["policy"] == wanted


def test_the_longest_delay_does_not_come_below_the_first_one(topic: Topic) -> None:
    path = f"{topic.admin_path}/groups/default"
    put(topic.client, path, {"retry": {"initial_seconds": 60}})
    response = topic.client.put(path, json={"retry": {"max_seconds": 59}})
    assert problem(response, 400, "invalid_request")["field"] == "retry.max_seconds"
    assert answer(topic.client.get(path))["policy"]["retry"]["max_seconds"] == 600


def test_the_number_of_queues_changes_only_while_they_are_drained(topic: Topic) -> None:
    topic.publish("x")
    problem(topic.client.put(topic.admin_path, json={"queues": 2}), 409, "conflict")
    message = topic.pop_one()
    problem(topic.client.put(topic.admin_path, json={"queues": 2}), 409, "conflict")
    topic.ack(message)
    assert put(topic.client, topic.admin_path, {"queues": 2})["queues"] == 2
    assert len(topic.state()["queues"]) == 2
    topic.publish(*"abcd")
    assert {message["queue"] for message in topic.pop_all(4)} == {0, 1}


def test_a_topic_can_not_turn_into_an_adopted_one(topic: Topic) -> None:
    problem(topic.client.put(topic.admin_path, json={"adopt": ["theirs"]}), 409, "conflict")


def test_a_queue_that_does_not_exist_can_not_be_adopted(server: HttpServer) -> None:
    document = problem(server.client.put("/v1/admin/topics/adopting", json={"adopt": ["absent"]}), 409, "conflict")
    assert ("absent" if server.broker == "rabbitmq" else "--amqp-url") in document["detail"]


INVALID: list[tuple[str, Any, str, str]] = [
    ("", {}, "queues", "either"),
    ("", {"queues": 1, "adopt": ["q"]}, "queues", "either"),
    ("", {"queues": 0}, "queues", "greater than or equal to 1"),
    ("", {"queues": 257}, "queues", "256"),
    ("", {"queues": "1"}, "queues", "integer"),
    ("", {"queues": 1.5}, "queues", "integer"),
    ("", {"queues": None}, "queues", "integer"),
    ("", {"adopt": []}, "adopt", "at least 1"),
    ("", {"adopt": [""]}, "adopt[0]", "1 to 255 characters of A-Z"),
    ("", {"adopt": ["q" * 256]}, "adopt[0]", "255"),
    ("", {"adopt": ["q", "é"]}, "adopt[1]", "and the space"),
    ("", {"adopt": ["q", 1]}, "adopt[1]", "string"),
    ("", {"queues": 1, "unique_message_ids": True}, "unique_message_ids", "adopted"),
    ("", {"queues": 1, "paused": True}, "paused", "not a field"),
    ("", {"quues": 1}, "quues", "not a field"),
    ("", [], "", "object"),
    ("/groups/default", {"invisibility_seconds": 0}, "invisibility_seconds", "1"),
    ("/groups/default", {"invisibility_seconds": 43_201}, "invisibility_seconds", "43200"),
    ("/groups/default", {"max_lease_seconds": 0.5}, "max_lease_seconds", "1"),
    ("/groups/default", {"max_lease_seconds": 43_201}, "max_lease_seconds", "43200"),
    ("/groups/default", {"max_lease_seconds": None}, "max_lease_seconds", "number"),
    ("/groups/default", {"max_deliveries": 0}, "max_deliveries", "1"),
    ("/groups/default", {"max_deliveries": 1_000_001}, "max_deliveries", "1000000"),
    ("/groups/default", {"retry": {"initial_seconds": -1}}, "retry.initial_seconds", "0"),
    ("/groups/default", {"retry": {"multiplier": 0.5}}, "retry.multiplier", "1"),
    ("/groups/default", {"retry": {"max_seconds": 43_201}}, "retry.max_seconds", "43200"),
    ("/groups/default", {"retry": {"initial_seconds": 9, "max_seconds": 8.5}}, "retry.initial_seconds", "8.5"),
    ("/groups/default", {"retry": {"initial_seconds": 601}}, "retry.initial_seconds", "600"),
    ("/groups/default", {"retry": {"max": 1}}, "retry.max", "not a field"),
    ("/groups/default", {"retry": None}, "retry", ""),
    ("/groups/default", {"max_in_flight": 0}, "max_in_flight", "1"),
    ("/groups/default", {"max_in_flight": 1_000_001}, "max_in_flight", "1000000"),
    ("/groups/default", {"paused": 1}, "paused", "boolean"),
    ("/groups/default", {"min_replicas": -1}, "min_replicas", "0"),
    ("/groups/default", {"min_replicas": 100}, "min_replicas", "99"),
    ("/groups/default", {"min_replicas": 2.5}, "min_replicas", "integer"),
    ("/groups/default", {"min_replicas": True}, "min_replicas", "integer"),
    ("/groups/default", {"min_replicas": "3"}, "min_replicas", "integer"),
]


@pytest.mark.parametrize(("path", "body", "field", "says"), INVALID)
def test_a_wrong_field_is_named_with_its_remedy(
    server: HttpServer, path: str, body: Any, field: str, says: str
) -> None:
    topic = Topic(server.client, "invalid")
    put(server.client, topic.admin_path, {"queues": 1})
    document = problem(server.client.put(topic.admin_path + path, json=body), 400, "invalid_request")
    assert document.get("field", "") == field
    assert says in document["detail"]


DAMAGED = [
    b"",
    b"{",
    b'{"queues":NaN}',
    b'{"queues":1e999}',
    b'{"queues":' + b"9" * 5000 + b"}",
    b'{"queues":1,"queues":2}',
    b'{"adopt":["\\ud800"]}',
    b'{"adopt":["\xff"]}',
    b'{"queues":\xff}',
    b'{"\\ud800":1}',
    b'{"adopt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"\xff\xfe",
]


@pytest.mark.parametrize("body", DAMAGED, ids=lambda body: repr(body)[:30])
def test_a_damaged_body_is_refused(server: HttpServer, body: bytes) -> None:
    document = problem(server.client.put("/v1/admin/topics/damaged", content=body), 400, "invalid_request")
    assert document["title"] == "The request is not valid"


def test_a_body_beyond_1_mib_is_too_large(server: HttpServer) -> None:
    body = json.dumps({"queues": 1, "x": "x" * 1024 * 1024})
    problem(server.client.put("/v1/admin/topics/large", content=body), 413, "message_too_large")


def test_the_metrics_of_each_proxy_can_be_read_through_any_other(server: HttpServer) -> None:
    cluster = answer(server.client.get("/v1/admin/cluster"))
    members = {cluster["instance"], *(one["instance"] for one in cluster["members"])}
    assert len(members) == (1 if server.owner is None else 2)
    resident: set[str] = set()
    for member in members:
        scraped = server.client.get("/metrics", params={"proxy": member})
        assert scraped.status_code == 200
        resident |= set(re.findall(r"^process_start_time_seconds (.+)$", scraped.text, re.MULTILINE))
    assert len(resident) == len(members), "each has its own metrics"
    for unknown in ("", "nobody"):
        problem(server.client.get("/metrics", params={"proxy": unknown}), 404, "proxy_not_found")


def test_no_topic_gets_a_name_that_popgate_uses_itself(server: HttpServer) -> None:
    for name in ("consumer", "guard", "presence"):
        refused = problem(server.client.put(f"/v1/admin/topics/{name}", json={"queues": 1}), 400, "invalid_request")
        assert refused["field"] == "topic"
