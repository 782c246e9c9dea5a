"""The trace of a message: from its publisher over HTTP or AMQP, through RabbitMQ, to the span that processes it."""

import contextlib
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pika.adapters.blocking_connection import BlockingChannel

from contract.http_server import HttpServer, Topic, answer, put, started_server
from popgate_client import Client, Consumer, Message, OutgoingMessage
from popgate_client.tracing import Tracing
from support.otlp import Collector
from support.processes import wait_until
from support.rabbitmq import RabbitNode

SERVER, CLIENT, PRODUCER = 2, 3, 4
"""Kinds of spans, as OTLP numbers them."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module", params=["embedded", "front"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[HttpServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_SERVICE_NAME", "orders")
        with started_server(request, tmp_path_factory.mktemp("tracing"), "--tracing") as started:
            yield started


@pytest.fixture
def topic(server: HttpServer) -> Topic:
    return server.topic()


class Caller:
    """The trace context of a program that sends requests."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace_id}-{self.span_id}-01", "tracestate": "vendor=1"}


def published(topic: Topic, caller: Caller | None = None, *messages: dict[str, Any]) -> None:
    body = {"messages": [*messages] or [{"body": "a"}]}
    results = answer(topic.client.post(f"{topic.path}/messages", json=body, headers=caller.headers if caller else None))
    assert {one["status"] for one in results["results"]} == {"published"}


def context_in(headers: Any) -> tuple[str, str]:
    """Return the ids of the trace and of the span in a header, without its version and flags."""
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    return trace_id, span_id


def test_a_message_is_traced_from_its_publish_to_its_settlement(collector: Collector, topic: Topic) -> None:
    caller = Caller()
    published(topic, caller)
    message = topic.pop_one(wait_seconds=5)
    assert topic.ack(message) == ["acked"]

    send = collector.one(f"send {topic.name}")
    assert (send.kind, send.context[0], send.parent) == (PRODUCER, caller.trace_id, caller.span_id)
    usual = {"messaging.system": "popgate", "messaging.destination.name": topic.name}
    assert send.attributes == {
        **usual,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": message["message_id"],
        "messaging.message.body.size": 1,
    }
    assert (send.resource["service.name"], "service.instance.id" in send.resource) == ("orders", True)
    assert (context_in(message["headers"]), message["headers"]["tracestate"]) == (send.context, "vendor=1")

    receive = collector.one(f"receive {topic.name}")
    assert (receive.kind, receive.links) == (CLIENT, (send.context,))
    assert receive.link_attributes == ({"messaging.message.id": message["message_id"]},)
    assert receive.attributes == {
        **usual,
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.consumer.group.name": "default",
        "messaging.message.id": message["message_id"],
        "messaging.destination.partition.id": "0",
    }

    ack = collector.one(f"ack {topic.name}")
    assert (ack.kind, ack.links, ack.is_error) == (CLIENT, (send.context, receive.context), False)
    assert ack.attributes["messaging.operation.type"] == "settle"
    assert ack.attributes["messaging.message.id"] == message["message_id"]


def test_a_batch_is_one_span_and_each_message_keeps_a_context_of_its_own(collector: Collector, topic: Topic) -> None:
    own = Caller()
    published(topic, None, {"body": "a"}, {"body": "b", "headers": own.headers, "message_id": "own"})
    send = collector.one(f"send {topic.name}")
    assert send.attributes["messaging.batch.message_count"] == 2
    assert send.links == ((own.trace_id, own.span_id),)
    assert send.parent == ""
    found = {one["body"]: context_in(one["headers"]) for one in topic.pop_all(2)}
    assert found == {"a": send.context, "b": (own.trace_id, own.span_id)}
    wait_until(lambda: bool(collector.named(f"receive {topic.name}")), timeout_seconds=10, what="the receive spans")
    linked = {link for one in collector.named(f"receive {topic.name}") for link in one.links}
    assert linked <= {send.context, (own.trace_id, own.span_id)}


def test_a_dead_letter_keeps_its_trace(collector: Collector, topic: Topic) -> None:
    published(topic, Caller())
    message = topic.pop_one(wait_seconds=5)
    assert topic.settle("reject", [{"receipt_handle": message["receipt_handle"]}]) == [{"status": "rejected"}]
    assert len(collector.one(f"reject {topic.name}").links) == 2
    path = f"{topic.admin_path}/groups/default/dead-letters"

    def letters() -> list[Any]:
        return list(answer(topic.client.get(path))["messages"])

    wait_until(lambda: bool(letters()), timeout_seconds=10, what="the dead letter")
    assert letters()[0]["headers"]["traceparent"] == message["headers"]["traceparent"]
    answer(topic.client.post(f"{path}/redrive", json={"wait_seconds": 5}))
    assert topic.pop_one(wait_seconds=10)["headers"]["traceparent"] == message["headers"]["traceparent"]


def test_what_fails_is_an_error_and_an_empty_pop_is_no_span(collector: Collector, topic: Topic) -> None:
    assert topic.pop() == []
    missing = f"missing-{secrets.token_hex(4)}"
    if topic.client.get("/v1").json()["broker"] != "embedded":
        assert (
            topic.client.post(f"/v1/topics/{missing}/messages", json={"messages": [{"body": "a"}]}).status_code == 404
        )
        send = collector.one(f"send {missing}")
        assert (send.is_error, send.attributes["error.type"]) == (True, "topic_not_found")
    assert topic.ack("not a handle") == ["invalid"]
    ack = collector.one(f"ack {topic.name}")
    assert (ack.is_error, ack.attributes["error.type"], ack.links) == (True, "invalid", ())
    assert not collector.named(f"receive {topic.name}")


def pulled(topic: Topic, queue: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Switch a topic with one queue to pull mode, and pull three messages. Return the client's terms, and the
    messages."""
    put(topic.client, f"{topic.admin_path}/groups/default/consume-mode", {"mode": "pull", "drain_timeout_seconds": 0})
    terms: dict[str, Any] = {"client_id": "a"}

    def has_queue() -> bool:
        asked = topic.client.post(f"{topic.group_path}/assignment", json={**terms, "supports": ["pull"]})
        if asked.is_success:
            terms["generation"] = asked.json()["generation"]
        return asked.is_success and asked.json()["queues"] == [queue]

    wait_until(has_queue, timeout_seconds=20, what="the queue of the pull client")
    body = {**terms, "max_messages": 2, "wait_seconds": 5}
    messages: list[Any] = []
    while len(messages) < 3:
        after = {"after": messages[-1]["receipt_handle"]} if messages else {}
        messages += answer(topic.client.post(f"{topic.group_path}/queues/{queue}/pull", json={**body, **after}))[
            "messages"
        ]
    return terms, messages


def test_pulls_and_commits_are_traced_like_pops_and_acks(collector: Collector, topic: Topic) -> None:
    caller = Caller()
    published(topic, None, *({"body": body} for body in "abc"))
    send = collector.one(f"send {topic.name}")
    terms, messages = pulled(topic)
    path = f"{topic.group_path}/queues/0/commit"
    for message, count in ((messages[1], 2), (messages[1], 0), (messages[2], 1)):
        body = {**terms, "receipt_handle": message["receipt_handle"]}
        assert answer(topic.client.post(path, json=body, headers=caller.headers)) == {"committed": count}
    wrong = {**terms, "generation": terms["generation"] + 1, "receipt_handle": messages[2]["receipt_handle"]}
    assert topic.client.post(path, json=wrong).status_code == 409

    wait_until(lambda: len(collector.named(f"commit {topic.name}")) == 4, timeout_seconds=10, what="the commits")
    first, again, last, fenced = collector.named(f"commit {topic.name}")
    receives = collector.named(f"receive {topic.name}")
    assert {link for one in receives for link in one.links} == {send.context}
    leased = {one.context for one in receives}
    assert first.links[:2] == (send.context,) * 2
    assert set(first.links[2:]) | set(last.links[1:]) == leased
    assert (first.kind, first.context[0], first.parent) == (CLIENT, caller.trace_id, caller.span_id)
    assert first.attributes["messaging.operation.type"] == "settle"
    assert first.attributes["messaging.batch.message_count"] == 2
    assert first.attributes["messaging.destination.partition.id"] == "0"
    assert (again.links, again.attributes["messaging.batch.message_count"]) == ((), 0)
    assert last.attributes["messaging.message.id"] == messages[2]["message_id"]
    assert (fenced.is_error, fenced.attributes["error.type"]) == (True, "fenced")


def test_a_lease_group_is_traced_from_its_forming_through_its_slices_to_its_ack(
    server: HttpServer, collector: Collector, topic: Topic
) -> None:
    published(topic, None, *({"body": body} for body in "abc"))
    send = collector.one(f"send {topic.name}")
    stream = f"{topic.group_path}/lease-groups/nightly"
    body = {"max_messages": 10, "slices": 2, "invisibility_seconds": 30}
    wait_until(lambda: answer(topic.client.get(topic.group_path))["ready"] == 3, timeout_seconds=10, what="readiness")
    assert answer(topic.client.put(f"{stream}/1", json=body))["count"] == 3
    lease = collector.one(f"lease {topic.name}")
    assert (lease.kind, lease.attributes["popgate.lease_group.epoch"]) == (CLIENT, 1)
    assert lease.attributes["messaging.batch.message_count"] == 3
    assert answer(topic.client.put(f"{stream}/2", json=body))["count"] == 0
    there = topic.client if server.owner is None else server.owner.client  # another proxy, if there is one
    slices = [answer(client.get(f"{stream}/1/messages?slice={n}")) for n, client in enumerate((topic.client, there))]
    assert sum(len(one["messages"]) for one in slices) == 3
    assert answer(there.post(f"{stream}/ack", json={"through_epoch": 1}))["acked"] == 3
    assert there.get(f"{stream}/1/messages").status_code == 410

    ack = collector.one(f"ack {topic.name}")
    assert (ack.links, ack.attributes["messaging.operation.type"]) == ((lease.context,), "settle")
    assert ack.attributes["messaging.batch.message_count"] == 3
    wait_until(lambda: len(collector.named(f"receive {topic.name}")) == 3, timeout_seconds=10, what="the slices")
    reads = sorted(collector.named(f"receive {topic.name}"), key=lambda span: -len(span.links))
    assert {frozenset(read.links) for read in reads[:2]} == {frozenset({send.context, lease.context})}
    assert sum(len(read.links) for read in reads[:2]) == 3 + 2
    assert (reads[2].is_error, reads[2].attributes["error.type"]) == (True, "lease_group_acked")
    assert len(collector.named(f"lease {topic.name}")) == 1


def test_the_spans_of_a_lock_are_linked_to_its_acquire(server: HttpServer, collector: Collector) -> None:
    caller, path, holder = Caller(), f"/v1/locks/l-{secrets.token_hex(4)}", f"h-{secrets.token_hex(4)}"
    there = server.client if server.owner is None else server.owner.client  # another proxy, if there is one
    put(server.client, path, {"kind": "mutex"})
    asked = {"holder": holder, "ttl_seconds": 30}
    given = answer(server.client.post(f"{path}/acquire", json=asked, headers=caller.headers))
    assert not answer(there.post(f"{path}/acquire", json=asked))["acquired"]
    token = {"token": given["token"]}
    assert answer(there.post(f"{path}/verify", json=token, headers=caller.headers))["held"]
    assert answer(server.client.post(f"{path}/renew", json=token))["held"]
    assert answer(there.post(f"{path}/release", json=token)) == {"released": True}
    assert there.post(f"{path}/verify", json=token).status_code == 409

    name = path.rpartition("/")[2]
    spans = collector.having("popgate.lock.name", name, count=6)
    assert not any(given["token"] in str(one) for one in spans)
    acquires = {one.attributes["popgate.lock.acquired"]: one for one in spans if one.name == "acquire lock"}
    acquire = acquires[True]
    assert (acquire.kind, acquire.context[0], acquire.parent) == (SERVER, caller.trace_id, caller.span_id)
    assert acquire.attributes == {
        "popgate.lock.name": name,
        "popgate.lock.holder": holder,
        "popgate.lock.acquired": True,
        "popgate.lock.kind": "mutex",
        "popgate.lock.slot": given["slot"],
        "popgate.lock.fencing_token": given["fencing_token"],
    }
    assert not acquires[False].is_error
    of_this = [one for one in spans if one.links]
    assert sorted(one.name for one in of_this) == ["release lock", "renew lock", "verify lock"]
    assert {one.links for one in of_this} == {(acquire.context,)}
    assert next(one for one in of_this if one.name == "verify lock").parent == caller.span_id
    assert [one.attributes["error.type"] for one in spans if one.is_error] == ["lock_lost"]


@pytest.mark.parametrize("pops_at_owner", [False, True], ids=["a pop at the front", "a pop at the owner"])
def test_a_settlement_at_another_proxy_than_the_pops_has_the_same_links(
    server: HttpServer, collector: Collector, topic: Topic, pops_at_owner: bool
) -> None:
    if server.owner is None:
        pytest.skip("there is one proxy")
    there = Topic(server.owner.client, topic.name)
    popping, settling = (there, topic) if pops_at_owner else (topic, there)
    published(topic, Caller(), {"body": "a"}, {"body": "b"})
    send = collector.one(f"send {topic.name}")
    messages = popping.pop_all(2)
    wait_until(lambda: bool(collector.named(f"receive {topic.name}")), timeout_seconds=10, what="the pops")
    one, *others = messages
    assert settling.settle("reject", [{"receipt_handle": one["receipt_handle"]}]) == [{"status": "rejected"}]
    assert settling.ack(*others, "not a handle") == ["acked", "invalid"]
    reject, ack = collector.one(f"reject {topic.name}"), collector.one(f"ack {topic.name}")
    receives = {one.context: one for one in collector.named(f"receive {topic.name}")}
    assert {receive.resource["service.instance.id"] for receive in receives.values()} != {
        reject.resource["service.instance.id"]
    }
    assert reject.links[0] == ack.links[0] == send.context
    assert {reject.links[1], ack.links[1]} == set(receives)
    assert reject.attributes["messaging.message.id"] == one["message_id"]
    assert not reject.is_error


@pytest.fixture
def channel(server: HttpServer, request: pytest.FixtureRequest) -> Iterator[BlockingChannel]:
    """A channel of another program on the server's RabbitMQ."""
    if server.broker == "embedded":
        pytest.skip("there is no AMQP")
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(node.amqp_url(server.vhost)))) as connection:
        yield connection.channel()


def test_the_context_is_in_the_headers_of_amqp(collector: Collector, topic: Topic, channel: BlockingChannel) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, f"popgate:{topic.name}", routing_key="0")
    published(topic, Caller())
    send = collector.one(f"send {topic.name}")
    _, properties, _ = channel.basic_get(queue, auto_ack=True)
    assert properties is not None
    assert properties.headers is not None
    assert context_in(properties.headers) == send.context
    assert properties.headers["tracestate"] == "vendor=1"


def test_the_context_of_an_amqp_publisher_is_linked(
    server: HttpServer, collector: Collector, channel: BlockingChannel
) -> None:
    publisher, name = Caller(), f"adopted-{secrets.token_hex(4)}"
    channel.queue_declare(name, durable=True)
    properties = pika.BasicProperties(headers=publisher.headers, message_id="m-1", delivery_mode=2)
    channel.basic_publish("", name, b"a", properties)
    put(server.client, f"/v1/admin/topics/{name}", {"adopt": [name]})
    put(server.client, f"/v1/admin/topics/{name}/groups/default")
    message = Topic(server.client, name).pop_one(wait_seconds=10)
    assert message["headers"] == publisher.headers
    assert collector.one(f"receive {name}").links == ((publisher.trace_id, publisher.span_id),)


def test_the_python_client_continues_the_trace(server: HttpServer, collector: Collector, topic: Topic) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing, tracer = Tracing(provider), provider.get_tracer("the program")
    seen: list[tuple[str, int]] = []
    done = threading.Event()

    def handle(message: Message) -> None:
        with tracer.start_as_current_span("work"):
            seen.append((message.text, trace.get_current_span().get_span_context().trace_id))
        if len(seen) == 2:
            done.set()
        if message.text == "b" and message.delivery_count == 1:
            raise ValueError("the body is b")

    with Client(server.process.url, tracing=tracing) as client, tracer.start_as_current_span("request") as request:
        results = client.publish(topic.name, "a", OutgoingMessage(body="b", headers={"x": 1}))
        assert [one.status for one in results] == ["published"] * 2
    consumer = Consumer(topic.name, "default", handle, base_url=server.process.url, tracing=tracing, concurrency=1)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        assert done.wait(20)
    finally:
        consumer.stop()
        thread.join(30)

    finished = {span.name: span for span in spans.get_finished_spans()}
    trace_id = request.get_span_context().trace_id
    send, process = finished[f"send {topic.name}"], finished[f"process {topic.name}"]
    assert {number for _, number in seen} == {trace_id}
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None
    assert send.context is not None
    assert process.parent.span_id == send.context.span_id
    assert (send.kind, process.kind) == (trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER)
    assert process.attributes is not None
    assert process.attributes["messaging.operation.type"] == "process"
    assert process.attributes["messaging.consumer.group.name"] == "default"
    failed = [one for one in spans.get_finished_spans() if not one.status.is_ok and one.name.startswith("process")]
    assert [one.attributes["error.type"] for one in failed if one.attributes is not None] == ["ValueError"]
    assert not any("the body" in one.to_json() for one in failed)

    at_proxy = collector.one(f"send {topic.name}")
    assert at_proxy.context[0] == f"{trace_id:032x}"
    assert at_proxy.parent == f"{send.context.span_id:016x}"


def test_a_proxy_that_stops_sends_its_last_spans(server: HttpServer, collector: Collector) -> None:
    """This test is the last one, because it stops the proxy."""
    topic = server.topic()
    published(topic)
    assert server.process.stop() == 0
    assert len(collector.named(f"send {topic.name}")) == 1


def test_without_tracing_nothing_of_the_sdk_is_loaded() -> None:
    program = (
        "import json, sys, popgate_client\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('opentelemetry')]))\n"
        "import popgate.bootstrap, popgate.bootstrap.http\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('opentelemetry.sdk')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], []]
