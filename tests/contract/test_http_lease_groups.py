"""Lease groups over HTTP (decision 12), against a real server on each broker."""

import time
from importlib import import_module
from typing import Any

import msgspec
import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem
from contract.http_server import lean_server as server
from support.processes import wait_until
from support.proxy import plain_client

__all__ = ["server"]

arrow: Any = import_module("pyarrow")  # it has no type stubs
arrow_ipc: Any = import_module("pyarrow.ipc")
ARROW = "application/vnd.apache.arrow.stream"
MSGPACK = "application/msgpack"
PATIENCE_SECONDS = 20.0


def path(topic: Topic, *parts: object) -> str:
    return "/".join([f"{topic.group_path}/lease-groups", *map(str, parts)])


def put(topic: Topic, epoch: int = 1, stream: str = "s", **fields: float) -> Json:
    return answer(topic.client.put(path(topic, stream, epoch), json={"max_messages": 1_000, **fields}))


def put_all(topic: Topic, count: int, **fields: float) -> Json:
    """Put a group once all `count` messages are ready."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while answer(topic.client.get(topic.group_path))["ready"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer(topic.client.put(path(topic, "s", 1), json={"max_messages": 1_000, **fields}))


def read(topic: Topic, number: int = 0, epoch: int = 1) -> list[Json]:
    response = topic.client.get(path(topic, "s", epoch, "messages"), params={"slice": number})
    assert response.headers.get("content-type") == "application/json", response.text
    messages: list[Json] = answer(response)["messages"]
    return messages


def groups(topic: Topic) -> list[Json]:
    found: list[Json] = answer(topic.client.get(path(topic)))["lease_groups"]
    return found


def post(topic: Topic, verb: str, **fields: float) -> Json:
    return answer(topic.client.post(path(topic, "s", verb), json=fields))


def test_a_batch_is_leased_read_in_slices_and_acked(topic: Topic) -> None:
    topic.publish(*(f"m{number}" for number in range(50)))
    assert put_all(topic, 50, slices=3) == {"count": 50, "slices": 3, "lost": 0, "existing": False}
    slices = [read(topic, number) for number in range(3)]
    assert sorted(one["body"] for part in slices for one in part) == sorted(f"m{number}" for number in range(50))
    assert [one["position"] for part in slices for one in part] == list(range(50))
    assert {one["delivery_count"] for part in slices for one in part} == {1}
    assert [read(topic, number) for number in range(3)] == slices
    assert put(topic, slices=1) == {"count": 50, "slices": 3, "lost": 0, "existing": True}
    assert topic.pop(max_messages=10) == []
    assert post(topic, "ack", through_epoch=1) == {"acked": 50, "already_acked": 0, "lost": 0}
    assert post(topic, "ack", through_epoch=1) == {"acked": 0, "already_acked": 50, "lost": 0}
    for response in (
        topic.client.put(path(topic, "s", 1), json={"max_messages": 1}),
        topic.client.get(path(topic, "s", 0, "messages")),
    ):
        assert "later epoch" in problem(response, 410, "lease_group_acked")["detail"]
    assert answer(topic.client.get(topic.group_path))["in_flight"] == 0


def test_a_batch_takes_all_of_an_ordering_key_and_keeps_its_order(topic: Topic) -> None:
    for start in range(0, 600, 200):
        topic.publish(*(f"a{number}" for number in range(start, start + 200)), ordering_key="a")
    topic.publish("b0", "b1", ordering_key="b")
    rival = topic.pop_one()
    assert rival["body"] == "a0", "the oldest"
    assert put_all(topic, 601, slices=2)["count"] == 2, "who stands behind somebody else's lease has to wait"
    assert [one["body"] for number in range(2) for one in read(topic, number)] == ["b0", "b1"]
    assert topic.ack(rival) == ["acked"]
    assert put(topic, 2, slices=2)["count"] == 599
    bodies = [one["body"] for number in range(2) for one in read(topic, number, 2)]
    assert bodies == [f"a{number}" for number in range(1, 600)]
    assert post(topic, "ack", through_epoch=2)["acked"] == 601


def test_a_batch_that_somebody_comes_back_for_is_never_formed_anew(topic: Topic) -> None:
    """With `max_messages` 0, an existing group is leased again, and nothing else is."""

    def come_back() -> Any:
        return topic.client.put(path(topic, "s", 1), json={"max_messages": 0, "invisibility_seconds": 600})

    topic.publish("a", "b")
    problem(come_back(), 404, "lease_group_not_found")
    assert put_all(topic, 2, invisibility_seconds=1) == {"count": 2, "slices": 1, "lost": 0, "existing": False}
    wait_until(lambda: groups(topic)[0]["state"] == "expired", timeout_seconds=PATIENCE_SECONDS, what="the leases' end")
    assert answer(come_back()) == {"count": 2, "slices": 1, "lost": 0, "existing": True}
    assert groups(topic)[0]["remaining_seconds"] > 300
    assert post(topic, "release", after_epoch=0) == {"released": 2}
    problem(come_back(), 404, "lease_group_not_found")
    assert put_all(topic, 2) == {"count": 2, "slices": 1, "lost": 0, "existing": False}
    assert post(topic, "ack", through_epoch=1)["acked"] == 2
    problem(come_back(), 410, "lease_group_acked")


def test_an_empty_batch_is_not_kept(topic: Topic) -> None:
    topic.pop()
    assert put(topic, slices=2) == {"count": 0, "slices": 2, "lost": 0, "existing": False}
    assert "PUT" in problem(topic.client.get(path(topic, "s", 1, "messages")), 404, "lease_group_not_found")["detail"]
    topic.publish("late")
    assert put_all(topic, 1)["count"] == 1
    assert [one["body"] for one in read(topic)] == ["late"]


def test_json_messagepack_and_arrow_say_the_same(topic: Topic) -> None:
    entries: list[Json] = [
        {"body": "grün", "headers": {"text": "ü", "int": 7, "yes": True, "none": None}, "message_id": "first"},
        {"body_base64": "/wA=", "ordering_key": "k"},
        {"body": ""},
    ]
    answer(topic.client.post(f"{topic.path}/messages", json={"messages": entries}))
    put_all(topic, 3)
    url = path(topic, "s", 1, "messages")
    as_json = read(topic)
    packed = topic.client.get(url, headers={"accept": MSGPACK})
    assert packed.headers["content-type"] == MSGPACK
    as_msgpack = msgspec.msgpack.decode(packed.content)["messages"]
    streamed = topic.client.get(url, headers={"accept": ARROW})
    assert streamed.headers["content-type"] == ARROW
    table = arrow_ipc.open_stream(streamed.content).read_all()
    table.validate(full=True)
    assert {field.name: str(field.type) for field in table.schema} == {
        "position": "int64",
        "message_id": "string",
        "body": "binary",
        "headers": "string",
        "ordering_key": "string",
        "queue": "int32",
        "delivery_count": "int32",
        "published_at": "timestamp[us, tz=UTC]",
        "first_delivered_at": "timestamp[us, tz=UTC]",
    }
    as_arrow = table.to_pylist()
    assert sorted(one["body"] for one in as_msgpack) == sorted([b"", "grün".encode(), b"\xff\x00"])
    assert [one["body"] for one in as_arrow] == [one["body"] for one in as_msgpack]
    for row, shown, raw in zip(as_arrow, as_json, as_msgpack, strict=True):
        assert shown.pop("body", None) == (raw["body"].decode() if "body_base64" not in shown else None)
        shown.pop("body_base64", None)
        raw.pop("body")
        assert shown == raw
        assert msgspec.json.decode(row["headers"]) == shown["headers"]
        for name in ("position", "queue", "delivery_count", "message_id"):
            assert row[name] == shown[name]
        assert row["ordering_key"] == shown.get("ordering_key")
        for name in ("published_at", "first_delivered_at"):
            assert row[name].timestamp() == pytest.approx(shown[name], abs=2e-6)


def test_an_empty_slice_is_whole_in_every_format(topic: Topic) -> None:
    topic.publish("one")
    put_all(topic, 1, slices=2)
    url = path(topic, "s", 1, "messages?slice=0")
    assert answer(topic.client.get(url)) == {"messages": []}
    assert msgspec.msgpack.decode(topic.client.get(url, headers={"accept": MSGPACK}).content) == {"messages": []}
    assert arrow_ipc.open_stream(topic.client.get(url, headers={"accept": ARROW}).content).read_all().num_rows == 0


def test_leases_that_ran_out_are_leased_again_and_what_a_rival_took_is_lost(topic: Topic) -> None:
    topic.publish(*(f"m{number}" for number in range(10)))
    put_all(topic, 10, invisibility_seconds=1)
    before = read(topic)
    rivals: list[Json] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(rivals) < 3:
        assert time.monotonic() < deadline
        rivals += topic.pop(max_messages=3 - len(rivals), wait_seconds=5, invisibility_seconds=60)
    taken = {one["body"] for one in rivals}
    expired = problem(topic.client.get(path(topic, "s", 1, "messages")), 409, "lease_group_expired")
    assert "PUT it again" in expired["detail"]
    assert put(topic, invisibility_seconds=60) == {"count": 7, "slices": 1, "lost": 3, "existing": True}
    assert read(topic) == [one for one in before if one["body"] not in taken]
    assert post(topic, "ack", through_epoch=1) == {"acked": 7, "already_acked": 0, "lost": 3}
    assert topic.ack(*rivals) == ["acked"] * 3


def test_a_late_ack_is_good_where_nobody_took_the_message(topic: Topic) -> None:
    topic.publish("a", "b")
    put_all(topic, 2, invisibility_seconds=1)
    time.sleep(1.2)
    assert post(topic, "ack", through_epoch=1) == {"acked": 2, "already_acked": 0, "lost": 0}
    assert topic.pop(max_messages=2, wait_seconds=1) == []


def test_groups_are_listed_extended_and_released_by_stream(topic: Topic) -> None:
    topic.publish("a", "b", "c")
    put_all(topic, 3, max_messages=1, invisibility_seconds=20)
    put(topic, 2, max_messages=1, invisibility_seconds=20)
    put(topic, 7, "other", max_messages=1)
    listed = answer(topic.client.get(path(topic)))["lease_groups"]
    assert [(one["stream"], one["epoch"], one["state"], one["count"], one["lost"]) for one in listed] == [
        ("other", 7, "leased", 1, 0),
        ("s", 1, "leased", 1, 0),
        ("s", 2, "leased", 1, 0),
    ]
    assert 0 < listed[1]["remaining_seconds"] <= 20
    assert [
        one["epoch"] for one in answer(topic.client.get(path(topic), params={"stream": "other"}))["lease_groups"]
    ] == [7]
    extended = post(topic, "extend", invisibility_seconds=300)["lease_groups"]
    assert [(one["epoch"], one["status"], one["count"]) for one in extended] == [(1, "extended", 1), (2, "extended", 1)]
    assert all(299 < one["remaining_seconds"] <= 300 for one in extended)
    first = read(topic, epoch=1)
    assert post(topic, "release", after_epoch=1) == {"released": 1}
    assert len(topic.pop(max_messages=3, wait_seconds=5)) == 1
    problem(topic.client.get(path(topic, "s", 2, "messages")), 404, "lease_group_not_found")
    assert read(topic, epoch=1) == first
    assert post(topic, "release", after_epoch=-1) == {"released": 1}


def test_an_extension_says_what_has_run_out(topic: Topic) -> None:
    topic.publish("a")
    put_all(topic, 1, invisibility_seconds=1)
    time.sleep(1.2)
    (one,) = post(topic, "extend", invisibility_seconds=300)["lease_groups"]
    assert (one["status"], one["remaining_seconds"]) == ("expired", 0)


@pytest.mark.parametrize(
    ("method", "tail", "body", "field"),
    [
        ("PUT", "s/1", {}, "max_messages"),
        ("PUT", "s/1", {"max_messages": -1}, "max_messages"),
        ("PUT", "s/1", {"max_messages": 100_001}, "max_messages"),
        ("PUT", "s/1", {"max_messages": 1.5}, "max_messages"),
        ("PUT", "s/1", {"max_messages": 1, "slices": 0}, "slices"),
        ("PUT", "s/1", {"max_messages": 1, "slices": 1_025}, "slices"),
        ("PUT", "s/1", {"max_messages": 1, "invisibility_seconds": 43_201}, "invisibility_seconds"),
        ("PUT", "s/1", {"max_messages": 1, "more": 1}, "more"),
        ("PUT", "s/-1", {"max_messages": 1}, "epoch"),
        ("PUT", "s/9223372036854775808", {"max_messages": 1}, "epoch"),
        ("PUT", "s!/1", {"max_messages": 1}, "stream"),
        ("PUT", "s/1?slices=2", {"max_messages": 1}, "slices"),
        ("GET", "s/1/messages?slice=x", None, "slice"),
        ("GET", "s/1/messages?slices=1", None, "slices"),
        ("GET", "s/1/messages?slice=1&slice=2", None, "slice"),
        ("GET", "?stream=!", None, "stream"),
        ("POST", "s/ack", {}, "through_epoch"),
        ("POST", "s/ack", {"through_epoch": -1}, "through_epoch"),
        ("POST", "s/ack", {"through_epoch": 0.5}, "through_epoch"),
        ("POST", "s/extend", {"invisibility_seconds": 0}, "invisibility_seconds"),
        ("POST", "s/release", {"after_epoch": -2}, "after_epoch"),
    ],
)
def test_a_wrong_request_is_told_the_field(topic: Topic, method: str, tail: str, body: Any, field: str) -> None:
    topic.pop()
    url = path(topic) + tail if tail.startswith("?") else path(topic, tail)
    response = topic.client.request(method, url, json=body)
    assert problem(response, 400, "invalid_request")["field"] == field


def test_a_slice_that_the_group_does_not_have_is_refused(topic: Topic) -> None:
    topic.publish("a")
    put_all(topic, 1, slices=2)
    response = topic.client.get(path(topic, "s", 1, "messages"), params={"slice": 2})
    assert problem(response, 400, "invalid_request")["field"] == "slice"


@pytest.mark.parametrize(
    ("method", "tail", "allowed"),
    [("POST", "", "GET"), ("GET", "/s/1", "PUT"), ("POST", "/s/1/messages", "GET"), ("PUT", "/s/ack", "POST")],
)
def test_a_wrong_method_is_told_the_right_one(topic: Topic, method: str, tail: str, allowed: str) -> None:
    response = topic.client.request(method, path(topic) + tail, json={})
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allowed


def test_what_does_not_exist_is_said_to_be_missing(topic: Topic, server: HttpServer) -> None:
    unknown = f"/v1/topics/{topic.name}-none/groups/default/lease-groups"
    problem(topic.client.get(unknown), 404, "topic_not_found")
    problem(topic.client.post(f"{unknown}/s/ack", json={"through_epoch": 1}), 404, "topic_not_found")
    topic.pop()
    problem(topic.client.get(path(topic, "s", 1, "messages", "more")), 404, "not_found")
    assert "lease_groups" in answer(server.client.get("/v1"))["features"]


def test_many_messages_in_one_group(server: HttpServer, full_run: bool) -> None:
    """50,000 over four queues: each is read once, always the same, and acked."""
    topic = server.topic()
    count = 50_000 if full_run else 3_000
    answer(topic.client.put(f"/v1/admin/topics/{topic.name}", json={"queues": 4}))
    answer(topic.client.put(f"/v1/admin/topics/{topic.name}/groups/default", json={}))
    for first in range(0, count, 250):
        entries = [{"body": f"{number:05}" + "x" * 200} for number in range(first, first + 250)]
        answer(topic.client.post(f"{topic.path}/messages", json={"messages": entries}))
    client = plain_client(server.process.url, timeout_seconds=120)
    response = client.put(path(topic, "s", 1), json={"max_messages": 100_000, "slices": 4, "invisibility_seconds": 600})
    assert answer(response) == {"count": count, "slices": 4, "lost": 0, "existing": False}
    rounds: list[Any] = []
    for _ in range(2):
        parts = [
            client.get(path(topic, "s", 1, "messages"), params={"slice": number}, headers={"accept": ARROW})
            for number in range(4)
        ]
        rounds.append(arrow.concat_tables([arrow_ipc.open_stream(part.content).read_all() for part in parts]))
    assert rounds[0].equals(rounds[1])
    assert rounds[0]["position"].to_pylist() == list(range(count))
    assert sorted(body[:5] for body in rounds[0]["body"].to_pylist()) == [b"%05d" % number for number in range(count)]
    response = client.post(path(topic, "s", "ack"), json={"through_epoch": 1})
    assert answer(response) == {"acked": count, "already_acked": 0, "lost": 0}
    client.close()
