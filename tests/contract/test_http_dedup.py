"""Publishing with a ``dedup_id`` over HTTP, on each broker (decision 6)."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, put
from contract.http_server import lean_server as server
from support.proxy import ProxyProcess

__all__ = ["server"]

MSGPACK = "application/msgpack"
SURELY_SECONDS, WATCH_SECONDS = 5.0, 0.4


def publish(topic: Topic, *messages: Json) -> list[Json]:
    """Publish; return the results, successful or not."""
    return list(answer(topic.client.post(f"{topic.path}/messages", json={"messages": messages}))["results"])


def acked_bodies(topic: Topic, count: int) -> list[str]:
    """Return exactly that many bodies, and any that come soon after them; ack all."""
    found: list[str] = []
    while messages := topic.pop(max_messages=32, wait_seconds=SURELY_SECONDS if len(found) < count else WATCH_SECONDS):
        assert set(topic.ack(*messages)) == {"acked"}
        found += [message["body"] for message in messages]
    return found


def test_the_server_says_that_it_deduplicates(server: HttpServer) -> None:
    assert "dedup" in answer(server.client.get("/v1"))["features"]


def test_a_repeat_is_answered_with_the_first_id_and_comes_once(topic: Topic) -> None:
    (first,) = publish(topic, {"body": "a", "dedup_id": "d"})
    assert first["status"] == "published"
    again = publish(topic, {"body": "b"}, {"body": "a", "dedup_id": "d", "message_id": "another"})
    assert again[0]["status"] == "published"
    assert again[1] == {"status": "duplicate", "message_id": first["message_id"]}
    assert sorted(acked_bodies(topic, 2)) == ["a", "b"]
    assert publish(topic, {"body": "a", "dedup_id": "d"}) == [again[1]], "also when it is long acked"
    assert acked_bodies(topic, 0) == []


def test_of_equal_ids_in_one_request_the_first_is_published(topic: Topic) -> None:
    results = publish(topic, *({"body": f"{number}", "dedup_id": f"d{number % 3}"} for number in range(9)))
    assert [result["status"] for result in results] == ["published"] * 3 + ["duplicate"] * 6
    ids = [result["message_id"] for result in results]
    assert ids == ids[:3] * 3
    assert sorted(acked_bodies(topic, 3)) == ["0", "1", "2"]


def test_every_group_gets_it_once(server: HttpServer) -> None:
    topic = server.topic("one", "two")
    for _ in range(3):
        publish(topic, {"body": "a", "dedup_id": "d"})
    assert [acked_bodies(topic.of(group), 1) for group in ("one", "two")] == [["a"], ["a"]]


def test_messagepack_has_it_too(topic: Topic) -> None:
    def publish_packed() -> Json:
        content = msgspec.msgpack.encode({"messages": [{"body": b"\xff", "dedup_id": "grün"}]})
        response = topic.client.post(f"{topic.path}/messages", content=content, headers={"content-type": MSGPACK})
        assert response.status_code == 200, response.text
        return msgspec.msgpack.decode(response.content)["results"][0]

    first = publish_packed()
    assert first["status"] == "published"
    assert publish_packed() == {"status": "duplicate", "message_id": first["message_id"]}


def test_of_many_at_the_same_time_one_is_published(topic: Topic) -> None:
    def publish_both(number: int) -> list[Json]:
        ids = ["a", "b"] if number % 2 else ["b", "a"]
        return [(one, *result.values()) for one, result in zip(ids, publish(topic, *_messages(ids)), strict=True)]

    with ThreadPoolExecutor(16) as pool:
        results = [result for both in pool.map(publish_both, range(64)) for result in both]
    for one in ("a", "b"):
        of_one = [(status, message_id) for dedup_id, status, message_id in results if dedup_id == one]
        assert sorted(status for status, _ in of_one) == ["duplicate"] * 63 + ["published"]
        assert len({message_id for _, message_id in of_one}) == 1
    assert sorted(acked_bodies(topic, 2)) == ["a", "b"]


def _messages(ids: list[str]) -> list[Json]:
    return [{"body": one, "dedup_id": one} for one in ids]


def test_a_message_that_no_group_gets_is_no_first_one(server: HttpServer) -> None:
    topic = Topic(server.client, f"{server.topic().name}-bare")
    put(server.client, topic.admin_path, {"queues": 1})
    (refused,) = publish(topic, {"body": "a", "dedup_id": "d"})
    assert (refused["status"], refused["error"]["code"]) == ("failed", "no_subscribers")
    put(server.client, f"{topic.admin_path}/groups/default")
    assert [result["status"] for result in publish(topic, {"body": "a", "dedup_id": "d"})] == ["published"]


def test_a_deleted_topic_forgets_its_ids(server: HttpServer, topic: Topic) -> None:
    publish(topic, {"body": "a", "dedup_id": "d"})
    assert server.client.delete(topic.admin_path).is_success
    put(server.client, topic.admin_path, {"queues": 1})
    put(server.client, f"{topic.admin_path}/groups/default")
    assert [result["status"] for result in publish(topic, {"body": "a", "dedup_id": "d"})] == ["published"]
    assert acked_bodies(topic, 1) == ["a"]


@pytest.mark.parametrize("dedup_id", ["", "d" * 129, 7, None])
def test_an_id_is_a_text_of_1_to_128_characters(topic: Topic, dedup_id: object) -> None:
    message = {"body": "a", "dedup_id": dedup_id}
    document = problem(
        topic.client.post(f"{topic.path}/messages", json={"messages": [message]}), 400, "invalid_request"
    )
    assert document["field"] == "messages[0].dedup_id"
    assert [one["status"] for one in publish(topic, {"body": "a", "dedup_id": "ü" * 128})] == ["published"]


def test_duplicates_are_counted_and_are_not_published_ones(server: HttpServer, topic: Topic) -> None:
    for _ in range(3):
        publish(topic, {"body": "a", "dedup_id": "d"}, {"body": "b"})
    metrics = server.metrics()
    assert metrics[f'popgate_events_total{{group="",kind="published",topic="{topic.name}"}}'] == 4
    assert metrics[f'popgate_events_total{{group="",kind="duplicate",topic="{topic.name}"}}'] == 2


# ---------------------------------------------------------------- processes of their own


@pytest.fixture(params=["embedded", "rabbitmq"])
def broker_arguments(request: pytest.FixtureRequest) -> list[str]:
    """Return the arguments that choose the broker."""
    return [] if request.param == "embedded" else ["--amqp-url", request.getfixturevalue("amqp_url")]


def test_what_was_answered_stays_true_over_a_kill(tmp_path: Path, broker_arguments: list[str]) -> None:
    with ProxyProcess(tmp_path, "--auto-create", "true", *broker_arguments) as process:
        topic = Topic(process.client, "orders")
        (first,) = publish(topic, {"body": "a", "dedup_id": "d"})
        assert first["status"] == "published"
        process.kill()
        process.start()
        assert publish(topic, {"body": "a", "dedup_id": "d"}) == [
            {"status": "duplicate", "message_id": first["message_id"]}
        ]
        assert acked_bodies(topic, 1) == ["a"]


def test_the_window_is_as_long_as_configured(tmp_path: Path, broker_arguments: list[str]) -> None:
    with ProxyProcess(tmp_path, "--auto-create", "true", "--dedup-seconds", "1", *broker_arguments) as process:
        topic = Topic(process.client, "orders")
        (first,) = publish(topic, {"body": "a", "dedup_id": "d"})
        time.sleep(1.1)  # this tests the end of the window
        (second,) = publish(topic, {"body": "a", "dedup_id": "d"})
        assert (first["status"], second["status"]) == ("published", "published")
        assert first["message_id"] != second["message_id"]
        assert acked_bodies(topic, 2) == ["a", "a"]
