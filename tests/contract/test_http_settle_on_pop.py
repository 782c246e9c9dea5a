"""A pop that also settles earlier messages: what is settled, what the pop gets then, and what the answer says."""

import secrets
import threading
import time

import httpx
import msgspec
import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, server
from support.processes import wait_until

__all__ = ["server"]

VERBS = ("ack", "release", "extend", "reject")


def pop(topic: Topic, **fields: object) -> Json:
    return answer(topic.client.post(f"{topic.group_path}/pop", json=fields))


def handle(message: Json) -> str:
    text: str = message["receipt_handle"]
    return text


def entries(*messages: Json, **fields: object) -> list[Json]:
    return [{"receipt_handle": handle(message), **fields} for message in messages]


def bodies(answered: Json) -> list[str]:
    return [message["body"] for message in answered["messages"]]


def test_each_settlement_is_answered_in_its_field_and_order(topic: Topic) -> None:
    topic.publish(*"abcdef")
    a, b, c, d, _, _ = topic.pop_all(6, invisibility_seconds=60)
    topic.publish("next")
    answered = pop(
        topic,
        max_messages=1,
        wait_seconds=5,
        ack=[handle(a), "nonsense", handle(a)],
        release=entries(b, delay_seconds=60, reason="later"),
        extend=entries(c, invisibility_seconds=90),
        reject=entries(d, reason="bad"),
    )
    assert bodies(answered) == ["next"]
    (extended,) = answered["extend"]
    assert extended["status"] == "extended"
    assert extended["invisible_until"] == pytest.approx(time.time() + 90, abs=5)
    assert [one["status"] for one in answered["ack"]] == ["acked", "invalid", "already_acked"]
    assert answered["release"] == [{"status": "released"}]
    assert answered["reject"] == [{"status": "rejected"}]
    assert topic.ack(a, b) == ["already_acked", "expired"]
    letters = answer(topic.client.get(f"{topic.admin_path}/groups/{topic.group}/dead-letters"))["messages"]
    assert [(letter["body"], letter["reason"]) for letter in letters] == [("d", "bad")]


def test_a_pop_without_settlements_answers_without_their_fields(topic: Topic) -> None:
    assert pop(topic).keys() == {"messages"}
    assert pop(topic, ack=[], release=[]).keys() == {"messages"}


def test_the_pop_gets_what_the_settlement_makes_available(topic: Topic) -> None:
    """The next message of an ordering key, and a place within max_in_flight; also without a wait."""
    topic.publish("first", "second", ordering_key="k")
    first = topic.pop_one(wait_seconds=5)
    wait_until(lambda: topic.state()["blocked"] == 1, timeout_seconds=5, what="the second message")
    answered = pop(topic, ack=[handle(first)])
    assert (bodies(answered), answered["ack"]) == (["second"], [{"status": "acked"}])
    topic.policy(max_in_flight=1)
    topic.publish("third")
    wait_until(lambda: topic.state()["ready"] == 1, timeout_seconds=5, what="the third message")
    answered = pop(topic, ack=[handle(answered["messages"][0])], wait_seconds=5)
    assert bodies(answered) == ["third"]
    released = pop(topic, release=entries(answered["messages"][0], delay_seconds=0), wait_seconds=5)
    assert (bodies(released), released["messages"][0]["delivery_count"]) == (["third"], 2)


def test_a_loop_that_settles_with_its_pops_gets_each_message_once(topic: Topic) -> None:
    topic.publish(*map(str, range(100)))
    topic.publish(*map(str, range(100, 200)))
    got: list[str] = []
    done: list[str] = []
    while len(got) < 200:
        answered = pop(topic, max_messages=10, wait_seconds=5, ack=done)
        assert [one["status"] for one in answered.get("ack", [])] == ["acked"] * len(done)
        got += bodies(answered)
        done = [handle(message) for message in answered["messages"]]
    assert pop(topic, ack=done)["messages"] == []
    assert sorted(map(int, got)) == list(range(200))
    state = topic.state()
    assert (state["ready"], state["in_flight"]) == (0, 0)


def test_a_repeated_attempt_gets_the_same_messages_and_says_that_all_was_settled(topic: Topic) -> None:
    topic.publish("a", "b")
    a, _ = topic.pop_all(2)
    topic.publish("c")
    asked = {"attempt_id": secrets.token_hex(4), "ack": [handle(a)], "wait_seconds": 5}
    first, again = pop(topic, **asked), pop(topic, **asked)
    assert first["ack"] == [{"status": "acked"}]
    assert again["ack"] == [{"status": "already_acked"}]
    assert bodies(first) == bodies(again) == ["c"]
    assert handle(first["messages"][0]) == handle(again["messages"][0])


def test_a_settlement_does_not_wait_for_the_messages_of_its_pop(topic: Topic) -> None:
    topic.publish("a")
    message = topic.pop_one(wait_seconds=5)
    answers: list[Json] = []
    waiting = threading.Thread(target=lambda: answers.append(pop(topic, ack=[handle(message)], wait_seconds=10)))
    waiting.start()
    wait_until(lambda: topic.state()["in_flight"] == 0, timeout_seconds=5, what="the ack")
    topic.publish("b")
    waiting.join(10)
    assert [(bodies(one), one["ack"]) for one in answers] == [(["b"], [{"status": "acked"}])]


def test_a_settlement_stands_although_its_pop_is_refused(topic: Topic) -> None:
    topic.publish("a")
    message = topic.pop_one(wait_seconds=5)
    mode = f"{topic.admin_path}/groups/{topic.group}/consume-mode"
    answer(topic.client.put(mode, json={"mode": "pull", "drain_timeout_seconds": 60}))
    refused = topic.client.post(f"{topic.group_path}/pop", json={"ack": [handle(message)]})
    problem(refused, 409, "wrong_mode")
    assert topic.ack(message) == ["already_acked"]


def test_messagepack_says_the_same(topic: Topic) -> None:
    topic.publish("a")
    message = topic.pop_one(wait_seconds=5)
    topic.publish("b")
    body = msgspec.msgpack.encode({"ack": [handle(message)], "wait_seconds": 5})
    headers = {"content-type": "application/msgpack"}
    answered = topic.client.post(f"{topic.group_path}/pop", content=body, headers=headers)
    decoded: Json = msgspec.msgpack.decode(answered.content)
    assert decoded["ack"] == [{"status": "acked"}]
    assert [one["body"] for one in decoded["messages"]] == [b"b"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ack": ["x"] * 257}, "ack"),
        ({"ack": "x"}, "ack"),
        ({"release": [{"receipt_handle": "x", "delay_seconds": -1}]}, "release[0].delay_seconds"),
        ({"extend": [{"receipt_handle": "x"}]}, "extend[0].invisibility_seconds"),
        ({"reject": ["x"]}, "reject[0]"),
    ],
)
def test_a_wrong_settlement_is_refused_with_the_name_of_its_field(topic: Topic, fields: Json, field: str) -> None:
    document = problem(topic.client.post(f"{topic.group_path}/pop", json=fields), 400, "invalid_request")
    assert document["field"] == field


def test_the_feature_is_listed(server: HttpServer) -> None:
    assert "settle_on_pop" in answer(server.client.get("/v1"))["features"]


def test_two_topics_do_not_settle_each_others_messages(server: HttpServer, topic: Topic) -> None:
    other = server.topic()
    other.publish("a")
    message = other.pop_one(wait_seconds=5)
    answered = pop(topic, **{verb: [handle(message)] if verb == "ack" else [] for verb in VERBS})
    assert answered["ack"] == [{"status": "invalid"}]
    assert other.ack(message) == ["acked"]


def test_a_client_that_does_not_read_its_answer_has_settled_nevertheless(topic: Topic) -> None:
    topic.publish("a")
    message = topic.pop_one(wait_seconds=5)
    body = {"ack": [handle(message)], "wait_seconds": 10}
    with pytest.raises(httpx.ReadTimeout):
        topic.client.post(f"{topic.group_path}/pop", json=body, timeout=0.5)
    assert topic.ack(message) == ["already_acked"]
