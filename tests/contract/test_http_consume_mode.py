"""Switching the consume mode over HTTP, also through a proxy that owns no queue (decision 10)."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, put
from contract.http_server import lean_server as server

__all__ = ["server"]


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    return server.topic(queues=2)


def path(topic: Topic) -> str:
    return f"{topic.admin_path}/groups/{topic.group}/consume-mode"


def switch(topic: Topic, mode: str, **fields: object) -> Json:
    return put(topic.client, path(topic), {"mode": mode, **fields})


def mode(topic: Topic) -> Json:
    return answer(topic.client.get(path(topic)))


def eventually(topic: Topic, holds: Callable[[Json], bool]) -> Json:
    deadline = time.monotonic() + 10
    while not holds(found := mode(topic)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def refused(topic: Topic, mode: str) -> None:
    document = problem(topic.client.post(f"{topic.group_path}/pop", json={}), 409, "wrong_mode")
    assert document["mode"] == mode


def proxies(server: HttpServer) -> int:
    return 1 if server.owner is None else 2


def test_a_group_is_in_pop_mode_and_every_proxy_says_so(server: HttpServer, topic: Topic) -> None:
    found = mode(topic)
    assert {**found, "proxies": ...} == {
        "topic": topic.name,
        "group": topic.group,
        "mode": "pop",
        "generation": 1,
        "wanted": "pop",
        "converged": True,
        "drain": None,
        "proxies": ...,
        "clients": [],
        "preview": None,
    }
    assert len(found["proxies"]) == proxies(server)
    assert [(one["mode"], one["generation"], one["converged"]) for one in found["proxies"]] == [
        ("pop", 1, True)
    ] * proxies(server)
    owned = sorted(one["queue"] for proxy in found["proxies"] for one in proxy["queues"])
    assert owned == [0, 1]


def test_a_group_drains_and_is_in_pull_mode_when_its_last_lease_is_over(server: HttpServer, topic: Topic) -> None:
    topic.publish("a", "b", "c", "d", "e")
    a, b, c, d, e = topic.pop_all(5, invisibility_seconds=600)
    begun = switch(topic, "pull", drain_timeout_seconds=300)
    assert (begun["mode"], begun["generation"], begun["wanted"], begun["converged"]) == ("draining", 2, "pull", False)
    assert begun["drain"]["leases_left"] == 5
    assert 290 < begun["drain"]["seconds_left"] <= 300
    assert all(proxy["converged"] for proxy in begun["proxies"])
    refused(topic, "draining")
    assert topic.state()["mode"] == "draining"
    assert answer(topic.client.get(f"{topic.admin_path}/groups/{topic.group}"))["mode"] == "draining"
    assert topic.ack(a) == ["acked"]
    handles = [{"receipt_handle": one["receipt_handle"]} for one in (b, c, d)]
    assert topic.settle("release", handles[:1])[0]["status"] == "released"
    assert topic.settle("reject", handles[1:2])[0]["status"] == "rejected"
    assert topic.settle("extend", [{**handles[2], "invisibility_seconds": 900}])[0]["status"] == "extended"
    eventually(topic, lambda found: bool(found["drain"]["leases_left"] == 2))
    assert topic.ack(d, e) == ["acked", "acked"]
    done = eventually(topic, lambda found: bool(found["converged"]))
    assert (done["mode"], done["generation"], done["drain"]) == ("pull", 3, None)
    refused(topic, "pull")
    assert topic.state()["mode"] == "pull"
    back = switch(topic, "pop")
    assert (back["mode"], back["generation"], back["converged"]) == ("pop", 4, True)
    assert topic.ack(topic.pop_one()) == ["acked"], "what was released"


def test_a_repeat_changes_nothing_and_half_way_back_no_lease_is_cut_off(topic: Topic) -> None:
    topic.publish("a", "b")
    (a,) = topic.pop(wait_seconds=1)
    assert switch(topic, "pull")["generation"] == 2
    assert switch(topic, "pull")["generation"] == 2
    assert 3_000 < switch(topic, "pull", drain_timeout_seconds=3_600)["drain"]["seconds_left"] <= 3_600
    assert switch(topic, "pop")["generation"] == 3
    assert switch(topic, "pop")["generation"] == 3
    b = topic.pop_one()
    assert topic.ack(a, b) == ["acked", "acked"]


def test_leases_that_outlast_a_drain_are_cut_off_and_come_again(topic: Topic) -> None:
    topic.publish("a")
    (a,) = topic.pop(wait_seconds=1, invisibility_seconds=600)
    switch(topic, "pull", drain_timeout_seconds=0.3)
    eventually(topic, lambda found: bool(found["converged"]))
    deadline = time.monotonic() + 5
    while (status := topic.ack(a)) != ["expired"]:
        assert status == ["unavailable"], status
        assert time.monotonic() < deadline
    switch(topic, "pop")
    again = topic.pop_one()
    assert (again["body"], again["delivery_count"]) == ("a", 2)


def test_a_pop_that_waits_is_told_at_once(topic: Topic) -> None:
    found: list[tuple[int, Any, float]] = []

    def wait() -> None:
        began = time.monotonic()
        response = topic.client.post(f"{topic.group_path}/pop", json={"wait_seconds": 20})
        found.append((response.status_code, response.json()["mode"], time.monotonic() - began))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(topic, lambda found: any(proxy["pollers"] for proxy in found["proxies"]))
    switch(topic, "pull", drain_timeout_seconds=0)
    waiting.join(timeout=10)
    ((status, told, seconds),) = found
    assert status == 409
    assert told in ("draining", "pull")
    assert seconds < 10


def test_a_repeated_attempt_gets_its_leases_also_while_the_group_drains(topic: Topic) -> None:
    topic.publish("a")
    first = topic.pop_one(attempt_id="try-1", invisibility_seconds=600)
    switch(topic, "pull")
    again = topic.pop_one(attempt_id="try-1")
    assert again["receipt_handle"] == first["receipt_handle"]
    refused(topic, "draining")


def test_lease_groups_that_hold_are_answered_while_the_group_drains_and_no_new_ones_are_made(topic: Topic) -> None:
    topic.publish("a", "b", "c")
    asked = {"max_messages": 2, "invisibility_seconds": 600}
    url = f"{topic.group_path}/lease-groups/nightly"
    made = put(topic.client, f"{url}/1", asked)
    switch(topic, "pull")
    again = put(topic.client, f"{url}/1", asked)
    assert (again["count"], again["existing"]) == (made["count"], True)
    problem(topic.client.put(f"{url}/2", json=asked), 409, "wrong_mode")
    assert answer(topic.client.post(f"{url}/ack", json={"through_epoch": 1}))["acked"] == made["count"]
    eventually(topic, lambda found: bool(found["converged"]))
    problem(topic.client.put(f"{url}/3", json=asked), 409, "wrong_mode")


def test_a_dry_run_tells_what_would_happen_and_changes_nothing(topic: Topic) -> None:
    topic.publish("a", "b", "c")
    leased = topic.pop_all(2, invisibility_seconds=600)
    before = mode(topic)
    told = switch(topic, "pull", drain_timeout_seconds=7, dry_run=True)
    assert {**told, "preview": None} == before
    preview = told["preview"]
    assert preview["steps"] == ["draining", "pull"]
    counts = [preview[name] for name in ("drain_timeout_seconds", "pollers", "pull_clients", "leases")]
    assert counts == [7, 0, 0, 2]
    assert [one["queue"] for one in preview["queues"]] == [0, 1]
    assert sum(one["leases"] for one in preview["queues"]) == 2
    assert switch(topic, "pop", dry_run=True)["preview"]["steps"] == []
    assert mode(topic) == before
    switch(topic, "pull")
    assert switch(topic, "pop", dry_run=True)["preview"]["steps"] == ["pop"]
    assert topic.ack(*leased) == ["acked", "acked"]
    eventually(topic, lambda found: found["mode"] == "pull")
    assert switch(topic, "pop", dry_run=True)["preview"]["steps"] == ["pop"]
    draining = switch(topic, "pop", drain_timeout_seconds=5, dry_run=True)["preview"]
    assert (draining["steps"], draining["drain_timeout_seconds"]) == (["draining", "pop"], 5)


def test_a_policy_is_changed_and_a_group_paused_whatever_its_mode(topic: Topic) -> None:
    switch(topic, "pull")
    eventually(topic, lambda found: bool(found["converged"]))
    topic.policy(max_deliveries=3)
    assert mode(topic)["mode"] == "pull"
    assert topic.state()["policy"]["max_deliveries"] == 3


def test_a_group_that_is_deleted_and_created_again_is_in_pop_mode(topic: Topic) -> None:
    url = f"{topic.admin_path}/groups/{topic.group}"
    switch(topic, "pull")
    eventually(topic, lambda found: bool(found["converged"]))
    assert topic.client.delete(url).status_code == 204
    put(topic.client, url)
    assert mode(topic)["mode"] == "pop"
    topic.publish("a")
    assert topic.pop_one()["body"] == "a"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "mode"),
        ({"mode": "draining"}, "mode"),
        ({"mode": "pull", "drain_timeout_seconds": -1}, "drain_timeout_seconds"),
        ({"mode": "pull", "drain_timeout_seconds": 43_201}, "drain_timeout_seconds"),
        ({"mode": "pull", "drain": 1}, "drain"),
    ],
)
def test_what_is_wrong_is_named(topic: Topic, body: Json, field: str) -> None:
    assert problem(topic.client.put(path(topic), json=body), 400, "invalid_request")["field"] == field


def test_a_group_that_is_not_there_has_no_mode(topic: Topic) -> None:
    problem(topic.client.get(path(topic.of("none"))), 404, "group_not_found")
    problem(topic.client.put(path(topic.of("none")), json={"mode": "pull"}), 404, "group_not_found")


def test_features_name_it(server: HttpServer) -> None:
    assert "consume_mode" in answer(server.client.get("/v1"))["features"]
