"""Delays and times to live as a client of the HTTP interface sees them, on both brokers."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from contract.http_server import HttpServer, Topic, answer, put
from contract.http_server import lean_server as server
from support.proxy import ProxyProcess

__all__ = ["server"]

pytestmark = pytest.mark.slow


def lateness_max(broker: str) -> float:
    """Return how late a delayed message may come: a second beyond the resolution."""
    return 1.0 if broker == "embedded" else 2.0


def pop_in_time(topic: Topic, due_at: float, late_seconds_max: float) -> object:
    """Return the next message, which must come at its time."""
    (message,) = topic.pop(wait_seconds=10, max_messages=1)
    assert due_at <= time.time() <= due_at + late_seconds_max
    return message


@pytest.mark.parametrize("delay_seconds", [0.3, 2])
def test_a_delayed_message_comes_at_its_time(server: HttpServer, delay_seconds: float) -> None:
    topic = server.topic("default", "other")
    before = time.time()
    topic.publish("later", headers={"n": 1}, delay_seconds=delay_seconds)
    topic.publish("at once", delay_seconds=0)
    for group in ("default", "other"):
        assert topic.of(group).pop_one()["body"] == "at once"
        state = topic.of(group).state()
        assert state["ready"] == 0
        assert state["delayed"] == (1 if server.broker == "embedded" else 0), "RabbitMQ's levels tell no topics apart"
    for group in ("default", "other"):
        message = pop_in_time(topic.of(group), before + delay_seconds, lateness_max(server.broker) + 0.5)
        assert message["body"] == "later"  # type: ignore[index]  # JSON
        assert message["headers"] == {"n": 1}, "nothing of the way shows"  # type: ignore[index]  # JSON
        assert before <= message["published_at"] <= before + 0.5, "it was published then"  # type: ignore[index]  # JSON
    assert topic.state()["delayed"] == 0


def test_messagepack_says_it_the_same_way(server: HttpServer) -> None:
    topic = server.topic()
    body = msgspec.msgpack.encode({"messages": [{"body": b"a", "delay_seconds": 1, "ttl_seconds": 60}]})
    response = server.client.post(
        f"{topic.path}/messages", content=body, headers={"content-type": "application/msgpack"}
    )
    assert response.status_code == 200, response.text
    assert topic.pop() == []
    assert topic.pop_one(wait_seconds=5)["body"] == "a"


def test_a_time_to_live_ends_a_message_that_nobody_took(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("short", ttl_seconds=0.5)
    topic.publish("long", ttl_seconds=3600)
    time.sleep(0.6)
    assert topic.pop_one(max_messages=10)["body"] == "long"
    assert topic.pop() == []
    assert server.metrics()[f'popgate_events_total{{group="default",kind="discarded",topic="{topic.name}"}}'] == 1


def test_a_leased_message_outlives_its_time_to_live_until_the_lease_ends(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("acked", "released", ttl_seconds=0.5)
    acked, released = topic.pop_all(2, invisibility_seconds=30)
    time.sleep(0.6)
    assert topic.ack(acked) == ["acked"]
    assert topic.settle("release", [{"receipt_handle": released["receipt_handle"]}]) == [{"status": "released"}]
    assert topic.pop() == []


def test_time_to_live_begins_after_the_delay(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("a", delay_seconds=1.5, ttl_seconds=1)
    assert topic.pop_one(wait_seconds=5)["body"] == "a"


def test_a_delayed_message_for_nobody_is_not_taken(server: HttpServer) -> None:
    topic = server.topic()
    assert server.client.delete(f"{topic.admin_path}/groups/default").status_code == 204
    messages = [{"body": "a", "delay_seconds": 1}, {"body": "b"}]
    results = answer(server.client.post(f"{topic.path}/messages", json={"messages": messages}))["results"]
    assert [result["error"]["code"] for result in results] == ["no_subscribers"] * 2


def test_a_group_that_came_meanwhile_gets_it_and_one_that_went_does_not(server: HttpServer) -> None:
    topic = server.topic("leaving")
    topic.publish("a", delay_seconds=1)
    put(server.client, f"{topic.admin_path}/groups/coming")
    assert server.client.delete(f"{topic.admin_path}/groups/leaving").status_code == 204
    assert topic.of("coming").pop_one(wait_seconds=5)["body"] == "a"


def test_features_name_it(server: HttpServer) -> None:
    assert {"delay", "ttl"} <= set(answer(server.client.get("/v1"))["features"])


@pytest.fixture(params=["embedded", "rabbitmq"])
def arguments(request: pytest.FixtureRequest) -> Callable[[], list[str]]:
    if request.param == "embedded":
        return list
    return lambda: ["--amqp-url", request.getfixturevalue("amqp_url")]


def test_delays_outlive_a_killed_proxy(tmp_path: Path, arguments: Callable[[], list[str]]) -> None:
    process = ProxyProcess(tmp_path, *arguments())
    with process:
        topic = Topic(process.client, "t")
        put(process.client, topic.admin_path, {"queues": 2})
        put(process.client, f"{topic.admin_path}/groups/default")
        before = time.time()
        topic.publish("one", "two", delay_seconds=1)
        topic.publish("released")
        message = topic.pop_one()
        entry = {"receipt_handle": message["receipt_handle"], "delay_seconds": 5}
        released_at = time.time()
        assert topic.settle("release", [entry]) == [{"status": "released"}]
        topic.publish("three", delay_seconds=4)
        process.kill()
        process.start()
        topic = Topic(process.client, "t")
        came: dict[str, float] = {}
        while len(came) < 4:
            for message in topic.pop(wait_seconds=10, max_messages=10):
                assert message["body"] not in came
                came[message["body"]] = time.time()
        assert min(came["one"], came["two"]) >= before + 1
        assert came["three"] >= before + 4
        assert came["released"] >= released_at + 5
        assert httpx.codes.is_success(process.client.get("/healthz").status_code)
