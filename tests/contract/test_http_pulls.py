"""Pull clients over HTTP, on every broker, and through a proxy that owns nothing."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pika
import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem, put
from contract.http_server import lean_server as server
from support.answers import bodies
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

__all__ = ["server"]

MSGPACK = {"content-type": "application/msgpack"}


class Client:
    """A pull client of one group."""

    def __init__(self, topic: Topic, name: str = "a") -> None:
        self.topic = topic
        self.name = name
        self.told: Json = {}

    @property
    def queues(self) -> list[int]:
        return list(self.told["queues"])

    def ask(self, *supports: str) -> Json:
        shown = {"generation": self.told["generation"]} if self.told else {}
        body = {"client_id": self.name, "supports": supports or ["pop", "pull"], **shown}
        self.told = answer(self.topic.client.post(f"{self.topic.group_path}/assignment", json=body))
        return self.told

    def is_let_in(self) -> bool:
        """Tell whether it gets an answer: the proxy may have just started."""
        body = {"client_id": self.name, "supports": ["pull"]}
        response = self.topic.client.post(f"{self.topic.group_path}/assignment", json=body)
        self.told = response.json() if response.is_success else {}
        return response.is_success

    def has_queues(self, count: int) -> None:
        """Ask until it has that many queues."""
        wait_until(lambda: len(self.ask()["queues"]) == count, timeout_seconds=20, what=f"{count} queues")

    def post(self, verb: str, queue: int, **fields: object) -> Any:
        body = {"client_id": self.name, "generation": self.told["generation"], **fields}
        return self.topic.client.post(f"{self.topic.group_path}/queues/{queue}/{verb}", json=body)

    def pull(self, queue: int = 0, **fields: object) -> list[Json]:
        return list(answer(self.post("pull", queue, **{"max_messages": 100, **fields}))["messages"])

    def pull_all(self, count: int, queue: int = 0) -> list[Json]:
        """Pull that many messages, which may come in several answers."""
        messages: list[Json] = []
        while len(messages) < count:
            after = {"after": messages[-1]["receipt_handle"]} if messages else {}
            more = self.pull(queue, wait_seconds=5, max_messages=min(256, count - len(messages)), **after)
            assert more, f"{len(messages)} came, not {count}"
            messages += more
        return messages

    def commit(self, message: Json) -> int:
        response = self.post("commit", message["queue"], receipt_handle=message["receipt_handle"])
        return int(answer(response)["committed"])

    def leave(self) -> None:
        path = f"{self.topic.group_path}/assignment/{self.name}"
        assert answer(self.topic.client.delete(path)) == {"left": True}


def pulled_topic(server: HttpServer, queues: int = 1) -> Topic:
    topic = server.topic(queues=queues)
    switch(topic, "pull")
    return topic


def switch(topic: Topic, mode: str) -> None:
    path = f"{topic.admin_path}/groups/{topic.group}/consume-mode"
    put(topic.client, path, {"mode": mode, "drain_timeout_seconds": 0})
    wait_until(lambda: answer(topic.client.get(path))["converged"], timeout_seconds=20, what=f"mode {mode}")


def clients(topic: Topic) -> dict[str, Json]:
    """Return the pull clients that the group's consume mode lists, by name."""
    path = f"{topic.admin_path}/groups/{topic.group}/consume-mode"
    return {one["client_id"]: one for one in answer(topic.client.get(path))["clients"]}


def test_a_client_registers_pulls_in_order_commits_and_leaves(server: HttpServer) -> None:
    topic = pulled_topic(server)
    client = Client(topic)
    told = client.ask()
    assert {**told, "generation": 0} == {
        "mode": "pull",
        "generation": 0,
        "queues": [0],
        "heartbeat_seconds": pytest.approx(10 / 3),
    }
    sent = [f"{number:03}" for number in range(300)]
    for first in range(0, 300, 100):
        topic.publish(*sent[first : first + 100])
    messages = client.pull_all(300)
    assert bodies(messages) == sent
    assert {message["delivery_count"] for message in messages} == {1}
    assert "invisible_until" not in messages[0], "it has none"
    assert topic.state()["in_flight"] == 300
    assert clients(topic)["a"]["leases"] == 300
    assert client.commit(messages[199]) == 200
    assert client.commit(messages[199]) == 0
    assert bodies(client.pull(max_messages=3)) == sent[200:203]
    assert client.commit(messages[-1]) == 100
    client.leave()
    client.leave()
    assert topic.state()["in_flight"] == 0
    assert clients(topic) == {}


def test_two_clients_share_the_queues_and_nobody_else_gets_theirs(server: HttpServer) -> None:
    topic = pulled_topic(server, queues=4)
    a, b = Client(topic, "a"), Client(topic, "b")
    a.ask()
    assert a.queues == [0, 1, 2, 3]
    b.ask()
    assert (b.queues, b.told["heartbeat_seconds"]) == ([], 1.0)
    leaving = clients(topic)["a"]["leaving"]
    assert (len(leaving), clients(topic)["b"]["queues"]) == (2, []), "a has not released them yet"
    a.ask()
    (mine, *_), theirs = a.queues, sorted({0, 1, 2, 3} - {*a.queues})
    problem(a.post("pull", theirs[0]), 409, "fenced")
    a.ask()
    b.has_queues(2)
    assert b.queues == theirs == leaving
    told = clients(topic)
    assert [(name, one["queues"], one["leaving"]) for name, one in told.items()] == [
        ("a", a.queues, []),
        ("b", theirs, []),
    ]
    assert told["b"]["generation"] == b.told["generation"]
    problem(b.post("pull", mine), 409, "fenced")
    topic.publish(*map(str, range(40)))
    got = {queue: bodies(client.pull_all(10, queue)) for client in (a, b) for queue in client.queues}
    assert sorted(int(body) for part in got.values() for body in part) == [*range(40)]
    assert all(part == sorted(part, key=int) for part in got.values())


def test_more_clients_than_queues_have_none_until_one_leaves(server: HttpServer) -> None:
    topic = pulled_topic(server)
    a, b = Client(topic, "a"), Client(topic, "b")
    a.ask()
    b.ask()
    assert b.queues == []
    topic.publish("one", "two")
    first, _ = a.pull_all(2)
    a.commit(first)
    a.leave()
    b.has_queues(1)
    (again,) = b.pull(wait_seconds=5)
    assert (again["body"], again["delivery_count"]) == ("two", 2)
    assert b.commit(again) == 1


def test_a_client_that_begins_anew_gets_all_again_and_its_earlier_self_is_fenced(server: HttpServer) -> None:
    topic = pulled_topic(server)
    before, after = Client(topic), Client(topic)
    before.ask()
    topic.publish(*"abc")
    had = before.pull_all(3)
    after.ask()
    again = after.pull_all(3)
    assert bodies(again) == ["a", "b", "c"]
    fenced = problem(before.post("commit", 0, receipt_handle=had[-1]["receipt_handle"]), 409, "fenced")
    assert "ask for the assignment" in fenced["detail"]
    problem(after.post("commit", 0, receipt_handle=had[-1]["receipt_handle"]), 409, "fenced")
    assert after.commit(again[-1]) == 3


def test_a_pull_wakes_up_when_a_message_comes(server: HttpServer) -> None:
    topic = pulled_topic(server)
    client = Client(topic)
    client.ask()
    assert client.pull() == []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.pull, wait_seconds=20)
        time.sleep(0.3)
        began = time.monotonic()
        topic.publish("late")
        assert bodies(waiting.result()) == ["late"]
        assert time.monotonic() - began < 2


def test_the_mode_is_told_and_who_comes_for_the_other_one_is_refused(server: HttpServer) -> None:
    topic = server.topic()
    client = Client(topic)
    told = client.ask()
    assert (told["mode"], told["queues"]) == ("pop", [])
    assert problem(client.post("pull", 0), 409, "wrong_mode")["mode"] == "pop"
    asked = {"client_id": "old", "supports": ["pull"]}
    refused = problem(topic.client.post(f"{topic.group_path}/assignment", json=asked), 409, "wrong_mode")
    assert refused["mode"] == "pop"
    topic.publish("one", "two")
    switch(topic, "pull")
    told = client.ask()
    assert (told["mode"], told["queues"]) == ("pull", [0])
    one, _ = client.pull_all(2)
    client.commit(one)
    assert problem(topic.client.post(f"{topic.group_path}/pop", json={}), 409, "wrong_mode")["mode"] == "pull"
    switch(topic, "pop")
    assert client.ask()["mode"] == "pop"
    problem(client.post("commit", 0, receipt_handle=one["receipt_handle"]), 409, "wrong_mode")
    (message,) = topic.pop(wait_seconds=5)
    assert message["body"] == "two"
    assert topic.ack(message) == ["acked"]


def test_a_pulled_message_can_be_rejected_and_no_other_verb_takes_its_receipt(server: HttpServer) -> None:
    topic = pulled_topic(server)
    client = Client(topic)
    client.ask()
    topic.publish(*"abc")
    a, b, c = client.pull_all(3)
    handle = a["receipt_handle"]
    assert topic.ack(a) == ["invalid"]
    assert topic.settle("release", [{"receipt_handle": handle}]) == [{"status": "invalid"}]
    extend = {"receipt_handle": handle, "invisibility_seconds": 5}
    assert topic.settle("extend", [extend]) == [{"status": "invalid"}]
    assert topic.settle("reject", [{"receipt_handle": b["receipt_handle"]}]) == [{"status": "rejected"}]
    assert client.commit(c) == 2
    wait_until(lambda: topic.state()["dead"] == 1, timeout_seconds=10, what="the dead letter")


def test_a_message_that_no_client_commits_dies_with_the_clients_that_had_it(server: HttpServer) -> None:
    topic = pulled_topic(server)
    topic.policy(max_deliveries=2)
    topic.publish("poison", "after")
    for name in ("a", "b"):
        client = Client(topic, name)
        client.has_queues(1)
        assert [one["body"] for one in client.pull(wait_seconds=10, max_messages=1)] == ["poison"]
        client.leave()
    last = Client(topic, "c")
    last.has_queues(1)
    (after,) = last.pull_all(1)
    assert after["body"] == "after"
    wait_until(lambda: topic.state()["dead"] == 1, timeout_seconds=20, what="the dead letter")
    page = answer(topic.client.get(f"{topic.admin_path}/groups/{topic.group}/dead-letters"))
    (letter,) = page["messages"]
    assert (letter["cause"], letter["delivery_count"], letter["client"]) == ("max_deliveries", 2, "b")
    attempts = [(one["attempt"], one["outcome"], one["client"], one["reason"]) for one in letter["attempts"]]
    assert attempts == [(number, "released", name, "the pull session ended") for number, name in ((1, "a"), (2, "b"))]


@pytest.mark.parametrize("is_unique", [True, False])
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_adopted_queues_are_pulled_in_order_as_well(
    server: HttpServer, request: pytest.FixtureRequest, kind: str, is_unique: bool
) -> None:
    """Even if messages have no stable id."""
    if server.broker == "embedded":
        pytest.skip("the embedded broker has no foreign queues")
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    name = f"legacy-{kind}-{is_unique}-{server.owner is not None}"
    with pika.BlockingConnection(pika.URLParameters(node.amqp_url(server.vhost))) as connection:
        channel = connection.channel()
        limit = {"x-delivery-limit": 1_000_000} if kind == "quorum" else {}
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind, **limit})
        for number in range(50):
            properties = pika.BasicProperties(message_id=f"{number}") if is_unique else None
            channel.basic_publish("", name, f"{number:02}".encode(), properties)
    topic = Topic(server.client, name)
    put(server.client, topic.admin_path, {"adopt": [name], "unique_message_ids": is_unique})
    put(server.client, f"{topic.admin_path}/groups/default")
    switch(topic, "pull")
    client = Client(topic)
    client.ask()
    messages = client.pull_all(50)
    assert bodies(messages) == [f"{number:02}" for number in range(50)]
    assert client.commit(messages[29]) == 30
    again = Client(topic)
    again.ask()
    rest = again.pull_all(20)
    assert bodies(rest) == bodies(messages[30:])
    assert again.commit(rest[-1]) == 20
    wait_until(lambda: topic.state()["in_flight"] == 0, timeout_seconds=10, what="the last commit")


def test_messagepack_has_bodies_as_bytes(server: HttpServer) -> None:
    topic = pulled_topic(server)
    client = Client(topic)
    client.ask()
    topic.publish("körper")
    asked = {"client_id": "a", "generation": client.told["generation"], "wait_seconds": 5}
    path = f"{topic.group_path}/queues/0/pull"
    response = topic.client.post(path, content=msgspec.msgpack.encode(asked), headers=MSGPACK)
    assert response.status_code == 200
    (message,) = msgspec.msgpack.decode(response.content)["messages"]
    assert message["body"] == "körper".encode()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("assignment", {"supports": ["pull"]}, "client_id"),
        ("assignment", {"client_id": "a b", "supports": ["pull"]}, "client_id"),
        ("assignment", {"client_id": "a", "supports": []}, "supports"),
        ("assignment", {"client_id": "a", "supports": ["push"]}, "supports[0]"),
        ("assignment", {"client_id": "a", "supports": ["pull"], "generation": 1.5}, "generation"),
        ("queues/0/pull", {"client_id": "a", "generation": 1, "max_messages": 0}, "max_messages"),
        ("queues/0/pull", {"client_id": "a", "generation": 1, "wait_seconds": 31}, "wait_seconds"),
        ("queues/0/pull", {"client_id": "a", "generation": -1}, "generation"),
        ("queues/1/pull", {"client_id": "a", "generation": 1}, "queue"),
        ("queues/0/commit", {"client_id": "a", "generation": 1}, "receipt_handle"),
        ("queues/0/commit", {"client_id": "a", "generation": 1, "receipt_handle": "x", "all": True}, "all"),
    ],
)
def test_a_wrong_field_is_named(server: HttpServer, path: str, body: Json, field: str) -> None:
    topic = server.topic()
    assert problem(topic.client.post(f"{topic.group_path}/{path}", json=body), 400, "invalid_request")["field"] == field


def test_a_receipt_handle_that_is_none_is_refused(server: HttpServer) -> None:
    topic = pulled_topic(server)
    client = Client(topic)
    client.ask()
    wrong = problem(client.post("commit", 0, receipt_handle="nonsense"), 400, "invalid_request")
    assert wrong["field"] == "receipt_handle"
    wrong = problem(client.post("pull", 0, after="nonsense"), 400, "invalid_request")
    assert wrong["field"] == "after"


def test_other_methods_and_paths_are_refused(server: HttpServer) -> None:
    topic = server.topic()
    group = topic.group_path
    for method, path, allowed in (
        ("GET", "assignment", "POST"),
        ("POST", "assignment/a", "DELETE"),
        ("GET", "queues/0/pull", "POST"),
    ):
        response = topic.client.request(method, f"{group}/{path}")
        problem(response, 405, "method_not_allowed")
        assert response.headers["allow"] == allowed
    for path in ("queues", "queues/0", "queues/x/pull", "queues/0/pop", "assignment/a/b"):
        problem(topic.client.post(f"{group}/{path}"), 404, "not_found")
    problem(
        topic.client.post("/v1/topics/nowhere/groups/g/queues/0/pull", json={"client_id": "a", "generation": 1}),
        404,
        "topic_not_found",
    )


def test_a_backlog_that_came_back_is_pulled_in_order_and_many_at_a_time_within_little_memory(
    rabbitmq: RabbitNode, tmp_path: Path
) -> None:
    """A redelivered message waits for its place, and its body is dropped meanwhile."""
    vhost = f"pulls-{tmp_path.name}"
    rabbitmq.add_vhost(vhost)
    flags = ("--amqp-url", rabbitmq.amqp_url(vhost))
    sent = [f"{number:03}{'x' * 50_000}" for number in range(100)]
    with ProxyProcess(tmp_path, *flags) as proxy:
        topic = Topic(proxy.client, "t")
        put(topic.client, topic.admin_path, {"queues": 1})
        put(topic.client, f"{topic.admin_path}/groups/default")
        switch(topic, "pull")
        client = Client(topic)
        client.ask()
        for body in sent:
            topic.publish(body)
        assert bodies(client.pull_all(len(sent))) == sent
        proxy.kill()
    with ProxyProcess(tmp_path, *flags, "--buffer-bytes-max", "1MiB") as proxy:
        client = Client(Topic(proxy.client, "t"))
        wait_until(client.is_let_in, timeout_seconds=20, what="the session to begin")
        seen = pulls = 0
        while seen < len(sent):
            messages = client.pull(wait_seconds=10, max_messages=10)
            assert bodies(messages) == sent[seen : seen + len(messages)]
            seen, pulls = seen + client.commit(messages[-1]), pulls + 1
        assert pulls < len(sent) / 5
    rabbitmq.delete_vhost(vhost)
