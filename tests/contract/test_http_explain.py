"""An operator's questions on both brokers, also through a proxy that owns nothing: why does a pop get nothing, what is
in a group, where is a message, why did it die?"""

import threading
import time
from collections.abc import Callable

import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem
from contract.http_server import lean_server as server
from support.processes import wait_until
from support.redis import RedisServer

__all__ = ["server"]

ERROR = {"type": "orders.NoSuchCustomer", "text": "customer 7 is unknown"}


class Questions:
    """The questions about one topic with one queue."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.client = topic.client
        self.path = f"{topic.admin_path}/groups/{topic.group}"

    def explain(self) -> Json:
        return answer(self.client.get(f"{self.path}/explain"))

    def codes(self) -> list[str]:
        return [reason["code"] for reason in self.explain()["reasons"]]

    def peek(self, **query: object) -> Json:
        return answer(self.client.get(f"{self.path}/messages", params={name: str(v) for name, v in query.items()}))

    def find(self, message_id: str, **query: str) -> Json:
        found = answer(self.client.get(f"{self.topic.admin_path}/messages", params={"find": message_id, **query}))
        assert found["unreachable"] == []
        (group,) = found["groups"]
        return group

    def copy(self, message_id: str) -> Json:
        (copy,) = self.find(message_id)["copies"]
        return copy


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    return server.topic()


@pytest.fixture
def ask(topic: Topic) -> Questions:
    return Questions(topic)


# ---------------------------------------------------------------- why a pop gets nothing


@pytest.mark.rabbitmq_versions
def test_a_group_says_why_a_pop_gets_nothing(ask: Questions) -> None:
    assert ask.codes() == ["empty"]
    ask.topic.publish("a", "b", ordering_key="k", message_id="order-7")
    soon(lambda: ask.explain()["would_get"], 10)
    assert ask.codes() == []
    popped = ask.topic.pop_one(client_id="billing-7", invisibility_seconds=60)
    blocked, leased = ask.explain()["reasons"]
    assert (blocked["code"], leased["code"]) == ("blocked_by_key", "all_leased")
    assert "order-7 of key 'k' is leased by billing-7" in blocked["detail"]
    assert time.time() < blocked["until"] == pytest.approx(popped["invisible_until"], abs=2)
    ask.topic.policy(max_in_flight=1)
    assert ask.codes() == ["max_in_flight"]
    ask.topic.policy(max_in_flight=None, paused=True)
    explained = ask.explain()
    assert explained["reasons"][0]["code"] == "paused"
    assert explained["would_get"] is False
    assert "popgate groups resume" in explained["reasons"][0]["remedy"]
    ask.topic.policy(paused=False)
    assert ask.topic.ack(popped) == ["acked"]
    ask.topic.settle("release", [{**_handle(ask.topic.pop_one()), "delay_seconds": 600}])
    (delayed,) = ask.explain()["reasons"]
    assert (delayed["code"], delayed["until"]) == ("delayed", pytest.approx(time.time() + 600, abs=20))


def test_a_group_in_pull_mode_says_so(ask: Questions) -> None:
    ask.topic.publish("a")
    answer(ask.client.put(f"{ask.path}/consume-mode", json={"mode": "pull", "drain_timeout_seconds": 0}))
    soon(lambda: ask.codes()[:1] == ["pull_mode"], 10)


def test_waiting_pops_with_filters_that_pass_nothing_are_named(ask: Questions) -> None:
    ask.topic.publish("a", headers={"color": "red"})
    fields = {"wait_seconds": 5, "filter": {"color": "blue"}}
    waiting = threading.Thread(target=ask.topic.pop, kwargs=fields)
    waiting.start()
    try:
        soon(lambda: ask.codes() == ["filters"], 4)
        explained = ask.explain()
        assert explained["would_get"] is True
        assert sum(proxy["filtered_pops"] for proxy in explained["standing"]["proxies"]) >= 1
        shown = [one for proxy in explained["standing"]["proxies"] for one in proxy["filters"]]
        assert {"color": ["blue"]} in shown
    finally:
        ask.topic.publish("b", headers={"color": "blue"})
        waiting.join()


def test_an_unknown_group_and_a_wrong_query_are_refused(ask: Questions) -> None:
    problem(ask.client.get(f"{ask.topic.admin_path}/groups/missing/explain"), 404, "group_not_found")
    problem(ask.client.get("/v1/admin/topics/missing/messages/1"), 404, "topic_not_found")
    for query in ({"state": "odd"}, {"limit": "101"}, {"after": "1.x.y"}, {"after": "..-"}, {"colour": "red"}):
        problem(ask.client.get(f"{ask.path}/messages", params=query), 400, "invalid_request")


# ---------------------------------------------------------------- peek


@pytest.mark.rabbitmq_versions
def test_messages_are_shown_without_leasing_them(ask: Questions) -> None:
    ask.topic.publish("first", headers={"color": "red"}, message_id="order-1")
    ask.topic.publish("second", "third", ordering_key="k")
    soon(lambda: ask.peek()["not_shown"] == 3, 10)
    page = ask.peek(fetch="true")
    assert [one["body_preview"] for one in page["messages"]] == ["first", "second", "third"]
    assert page["not_shown"] == 0
    first, second, third = page["messages"]
    assert (first["message_id"], first["headers"], first["body_bytes"]) == ("order-1", {"color": "red"}, 5)
    assert [one["state"] for one in page["messages"]] == ["ready", "ready", "blocked"]
    assert [one["place"] for one in page["messages"]] == [1, 2, 3]
    assert (third["blocked_by"]["id"], third["blocked_by"]["ahead"]) == (second["id"], 1)
    assert [one["ordering_key"] for one in ask.peek(key="k")["messages"]] == ["k", "k"]
    assert "receipt" not in str(page)
    popped = ask.topic.pop_one(client_id="billing-7", invisibility_seconds=60)
    assert (popped["body"], popped["delivery_count"]) == ("first", 1), "a peek is no delivery"
    (leased,) = ask.peek(state="leased")["messages"]
    assert (leased["message_id"], leased["lease"]["client"], leased["attempt"]) == ("order-1", "billing-7", 1)
    assert leased["lease"]["deadline"] == pytest.approx(popped["invisible_until"], abs=2)
    ask.topic.settle("release", [{**_handle(popped), "delay_seconds": 60}])
    (delayed,) = ask.peek(state="delayed")["messages"]
    assert delayed["visible_at"] == pytest.approx(time.time() + 60, abs=10)
    assert [one["id"] for one in ask.peek(state="blocked")["messages"]] == [third["id"]]


def test_pages_follow_each_other_and_long_bodies_are_cut(ask: Questions) -> None:
    bodies = [f"{number:02}" + "é" * 2_000 for number in range(7)]
    ask.topic.publish(*bodies)
    ask.client.post(
        f"{ask.topic.path}/messages", json={"messages": [{"body_base64": "//79", "headers": {"long": "x" * 1_000}}]}
    )
    soon(lambda: len(ask.peek(fetch="true", limit=100)["messages"]) == 8, 10)
    seen: list[Json] = []
    page = ask.peek(limit=3)
    while True:
        seen += page["messages"]
        if page["next"] is None:
            break
        page = ask.peek(limit=3, after=page["next"])
    assert [one["body_preview"] for one in seen[:7]] == [body[:513] for body in bodies]
    assert [one["body_bytes"] for one in seen[:7]] == [4_002] * 7
    assert seen[7]["body_preview"] is None
    assert seen[7]["body_preview_base64"] == "//79"
    assert seen[7]["headers"]["long"] == "x" * 256 + "..."


def test_a_paused_group_shows_its_messages_too(ask: Questions) -> None:
    ask.topic.publish("a", "b")
    ask.topic.policy(paused=True)
    soon(lambda: ask.peek()["not_shown"] == 2, 10)
    assert [one["body_preview"] for one in ask.peek(fetch="true")["messages"]] == ["a", "b"]
    assert ask.topic.pop(wait_seconds=0.2) == []
    ask.topic.policy(paused=False)
    assert [one["delivery_count"] for one in ask.topic.pop_all(2)] == [1, 1]


# ---------------------------------------------------------------- where is my message?


@pytest.mark.rabbitmq_versions
def test_a_message_is_found_from_its_publish_to_its_end(ask: Questions) -> None:
    ask.topic.publish("a", message_id="order/7")
    soon(lambda: "wait at the broker" in ask.find("order/7")["because"][0], 10)
    (ready,) = ask.find("order/7", fetch="true")["copies"]
    assert (ready["state"], ready["message"]["place"]) == ("ready", 1)
    popped = ask.topic.pop_one(client_id="billing-7", invisibility_seconds=60)
    leased = ask.copy("order/7")
    assert (leased["state"], leased["message"]["lease"]["client"]) == ("leased", "billing-7")
    assert "leased to billing-7 until 20" in leased["detail"]
    assert leased["message"]["body_preview"] is None
    why = {"reason": "later", "error": ERROR, "client_id": "billing-7"}
    ask.topic.settle("release", [{**_handle(popped), "delay_seconds": 60, **why}])
    delayed = ask.copy("order/7")
    assert (delayed["state"], "waits for its next attempt until 20" in delayed["detail"]) == ("delayed", True)
    assert "Attempt 1 of billing-7 was released at 20" in delayed["detail"]
    assert f"later: {ERROR['type']}: {ERROR['text']}." in delayed["detail"]


def test_a_message_whose_time_to_live_or_whose_lease_is_over_says_so(ask: Questions) -> None:
    ask.topic.publish("a", message_id="1", ttl_seconds=1)
    ask.topic.publish("b", message_id="2")
    soon(lambda: [one["state"] for one in ask.find("1", fetch="true")["copies"]] == ["expired"], 10)
    assert "time to live ended at 20" in ask.copy("1")["detail"]
    ask.topic.pop_one(invisibility_seconds=1)
    soon(lambda: ask.copy("2")["state"] == "ready", 10)
    assert "The lease of attempt 1 expired at 20" in ask.copy("2")["detail"]


def test_a_pulled_message_has_no_deadline(ask: Questions) -> None:
    ask.topic.publish("a", message_id="1")
    answer(ask.client.put(f"{ask.path}/consume-mode", json={"mode": "pull", "drain_timeout_seconds": 0}))
    client = {"client_id": "p-1"}
    assigned: Json = {}

    def is_assigned() -> bool:
        response = ask.client.post(f"{ask.topic.group_path}/assignment", json={**client, "supports": ["pull"]})
        assigned.update(response.json())
        return response.is_success

    soon(is_assigned, 10)
    pull = {**client, "generation": assigned["generation"], "wait_seconds": 10}
    assert answer(ask.client.post(f"{ask.topic.group_path}/queues/0/pull", json=pull))["messages"]
    pulled = ask.copy("1")
    assert (pulled["state"], pulled["message"]["lease"]["deadline"]) == ("leased", None)
    assert "leased to the pull client p-1, until the client commits it or its session ends" in pulled["detail"]
    assert ask.peek()["messages"][0]["lease"] == pulled["message"]["lease"]
    assert {queue["next_at"] for proxy in ask.explain()["standing"]["proxies"] for queue in proxy["queues"]} == {None}


def test_a_blocked_message_names_the_one_in_front(ask: Questions) -> None:
    ask.topic.publish("a", ordering_key="k", message_id="1")
    ask.topic.publish("b", ordering_key="k", message_id="2")
    ask.topic.pop_one(invisibility_seconds=60)
    soon(lambda: ask.find("2", fetch="true")["copies"], 10)
    copy = answer(ask.client.get(f"{ask.topic.admin_path}/messages/2"))["groups"][0]["copies"][0]
    assert (copy["state"], copy["message"]["blocked_by"]["message_id"]) == ("blocked", "1")
    assert "behind message 1 of the same ordering key, which is leased" in copy["detail"]


@pytest.mark.rabbitmq_versions
def test_a_dead_a_settled_and_an_unknown_message_are_told_apart(ask: Questions) -> None:
    (published,) = ask.topic.publish("a")
    ask.topic.publish("b", message_id="order-8")
    first, second = sorted(ask.topic.pop_all(2, invisibility_seconds=60), key=lambda one: str(one["body"]))
    ask.topic.settle("reject", [{**_handle(second), "reason": "no such customer"}])
    dead = ask.copy("order-8")
    assert (dead["state"], dead["reason"]) == ("dead", "no such customer")
    assert "after 1 attempt: no such customer." in dead["detail"]
    letter = answer(ask.client.get(f"{ask.path}/dead-letters/{dead['dead_letter']}"))
    assert letter["message_id"] == "order-8"
    assert ask.topic.ack(first) == ["acked"]
    settled = ask.find(published["message_id"])
    assert settled["state"] in ("settled", "unknown"), "the record may be gone already"
    if settled["copies"]:
        assert settled["copies"][0]["at"] == pytest.approx(time.time(), abs=20)
    unknown = ask.find("order-9")
    assert (unknown["state"], unknown["copies"], unknown["is_searched"]) == ("unknown", [], True)
    assert any("never have been published" in sentence for sentence in unknown["because"])


def test_a_proxy_that_does_not_answer_is_named(server: HttpServer) -> None:
    if server.owner is None:
        pytest.skip("there is one proxy only")
    ask = Questions(server.topic())
    ask.topic.publish("a", message_id="order-7")
    server.owner.pause()
    try:
        explained = ask.explain()
        assert {"proxy_unreachable", "no_owner"} & {reason["code"] for reason in explained["reasons"]}
        assert explained["would_get"] is False
        found = answer(ask.client.get(f"{ask.topic.admin_path}/messages/order-7"))
        (group,) = found["groups"]
        assert group["state"] == "unknown"
        told = ("does not answer", "No proxy owns queue 0")
        assert any(words in sentence for sentence in group["because"] for words in told)
    finally:
        server.owner.resume()
    soon(lambda: ask.explain()["would_get"], 30)


def test_a_message_in_memory_is_found_while_the_state_store_is_away(
    server: HttpServer, ask: Questions, request: pytest.FixtureRequest
) -> None:
    if server.owner is None:
        pytest.skip("the store of the embedded proxy is in its process")
    redis: RedisServer = request.getfixturevalue("redis_server")
    ask.topic.publish("a", message_id="1")
    ask.topic.pop_one(invisibility_seconds=60, client_id="w-1")
    redis.pause()
    try:
        assert "leased to w-1" in ask.copy("1")["detail"]
        assert any("lease record can't be read" in sentence for sentence in ask.find("2")["because"])
    finally:
        redis.resume()
    soon(lambda: "all_leased" in ask.codes(), 20)


# ---------------------------------------------------------------- why did it die?


@pytest.mark.rabbitmq_versions
def test_a_rejected_message_keeps_its_error_its_client_and_its_attempts(topic: Topic) -> None:
    began = time.time()
    topic.publish("a", message_id="order-7")
    first = topic.pop_one(client_id="w-1", invisibility_seconds=60)
    topic.settle(
        "release", [{**_handle(first), "reason": "later", "error": {"type": "TimeoutError"}, "client_id": "w-1"}]
    )
    second = topic.pop_one(client_id="w-2", invisibility_seconds=60)
    entry = {**_handle(second), "reason": "no such customer", "error": ERROR, "client_id": "w-2"}
    assert topic.settle("reject", [entry]) == [{"status": "rejected"}]
    (letter,) = letters(topic)
    assert (letter["reason"], letter["error"], letter["client"]) == ("no such customer", ERROR, "w-2")
    one, two = letter["attempts"]
    assert (one["attempt"], one["outcome"], one["client"], one["reason"]) == (1, "released", "w-1", "later")
    assert (one["error_type"], "error_text" in one) == ("TimeoutError", False)
    assert (two["attempt"], two["outcome"], two["error_text"]) == (2, "rejected", ERROR["text"])
    times = [one["leased_at"], one["ended_at"], two["leased_at"], two["ended_at"]]
    assert times == sorted(times)
    assert began - 5 < times[0]
    assert times[-1] < time.time() + 5
    assert answer(topic.client.get(f"{topic.admin_path}/groups/{topic.group}/dead-letters/{letter['id']}")) == letter
    (group,) = answer(topic.client.get(f"{topic.admin_path}/messages/order-7"))["groups"]
    assert group["copies"][0]["reason"] == "no such customer"


@pytest.mark.rabbitmq_versions
def test_a_message_whose_leases_expire_keeps_when_and_by_whom(topic: Topic) -> None:
    topic.policy(max_deliveries=2)
    topic.publish("a")
    topic.pop_one(client_id="w-1", invisibility_seconds=1)
    second = topic.pop_one(client_id="w-2", invisibility_seconds=1, wait_seconds=10)
    assert second["delivery_count"] == 2
    wait_until(lambda: topic.state()["dead"] == 1, timeout_seconds=20, what="the dead letter")
    (letter,) = letters(topic)
    assert letter["cause"] == letter["reason"] == "max_deliveries"
    assert letter["client"] == "w-2"
    assert "error" not in letter
    assert [(one["attempt"], one["outcome"]) for one in letter["attempts"]] == [(1, "expired"), (2, "expired")]
    assert [one["client"] for one in letter["attempts"]] == ["w-1", "w-2"]
    for one in letter["attempts"]:
        assert one["ended_at"] - one["leased_at"] == pytest.approx(1, abs=0.1)


def test_the_policys_retry_delay_keeps_the_attempts_too(topic: Topic) -> None:
    topic.policy(max_deliveries=2, retry={"initial_seconds": 0.2, "multiplier": 1, "max_seconds": 1})
    topic.publish("a")
    topic.pop_one(client_id="w-1", invisibility_seconds=1)
    second = topic.pop_one(client_id="w-2", invisibility_seconds=60, wait_seconds=10)
    topic.settle("release", [{**_handle(second), "error": ERROR}])
    wait_until(lambda: topic.state()["dead"] == 1, timeout_seconds=20, what="the dead letter")
    (letter,) = letters(topic)
    first, last = letter["attempts"]
    assert (first["outcome"], first["client"], last["outcome"]) == ("expired", "w-1", "released")
    assert (letter["error"], letter["cause"]) == (ERROR, "max_deliveries")


def test_a_redriven_message_begins_anew(topic: Topic) -> None:
    topic.publish("a")
    topic.settle("reject", [{**_handle(topic.pop_one()), "error": ERROR}])
    redrive = f"{topic.admin_path}/groups/{topic.group}/dead-letters/redrive"
    assert answer(topic.client.post(redrive, json={"wait_seconds": 20}))["moved"] == 1
    again = topic.pop_one(wait_seconds=5)
    assert (again["delivery_count"], again["headers"]) == (1, {})
    topic.settle("reject", [{**_handle(again), "reason": "again"}])
    (letter,) = letters(topic)
    assert [one["attempt"] for one in letter["attempts"]] == [1]
    assert "error" not in letter


def test_a_settlement_in_a_pop_says_why_too(topic: Topic) -> None:
    topic.publish("a")
    popped = topic.pop_one()
    answered = answer(
        topic.client.post(f"{topic.group_path}/pop", json={"reject": [{**_handle(popped), "error": ERROR}]})
    )
    assert answered["reject"] == [{"status": "rejected"}]
    assert letters(topic)[0]["error"] == ERROR


def test_wrong_causes_are_refused_by_name(topic: Topic) -> None:
    path = f"{topic.group_path}/reject"
    for entry, field in (
        ({"error": {"kind": "a"}}, "entries[0].error.kind"),
        ({"error": "a"}, "entries[0].error"),
        ({"error": {"text": "x" * 5_000}}, "entries[0].error.text"),
        ({"client_id": "a b"}, "client_id"),
    ):
        refused = topic.client.post(path, json={"entries": [{"receipt_handle": "h", **entry}]})
        assert problem(refused, 400, "invalid_request")["field"] == field


def letters(topic: Topic) -> list[Json]:
    return list(answer(topic.client.get(f"{topic.admin_path}/groups/{topic.group}/dead-letters"))["messages"])


def soon(condition: Callable[[], object], seconds: float) -> None:
    wait_until(lambda: bool(condition()), timeout_seconds=seconds, what="the expected answer")


def _handle(message: Json) -> Json:
    return {"receipt_handle": message["receipt_handle"]}
