"""The spans of a program that consumes a group directly from a real RabbitMQ, as a collector gets them."""

import asyncio
import secrets

import pika
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from popgate_client import Message, Reject
from popgate_client.amqp import AmqpConsumer
from popgate_client.tracing import Tracing
from support.amqp_apps import declare_group
from support.otlp import Collector

CLIENT, CONSUMER = 3, 5
"""Kinds of spans, as OTLP numbers them."""
TRACE_ID, SPAN_ID = secrets.token_hex(16), secrets.token_hex(8)
CREATED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


def publish(amqp_url: str, queue: str) -> None:
    """Publish a message with a context that is acked, one that fails once and is rejected then, and one without a
    context."""
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        for body, headers in (("good", CREATED), ("bad", CREATED), ("untraced", None)):
            properties = pika.BasicProperties(headers=headers, message_id=body, delivery_mode=2)
            connection.channel().basic_publish("", queue, body.encode(), properties)


async def test_each_message_is_processed_and_settled_in_spans_of_its_trace(amqp_url: str) -> None:
    topic, seen = f"t-{secrets.token_hex(4)}", list[tuple[str, str]]()
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(message: Message) -> None:
        seen.append((message.text, f"{trace.get_current_span().get_span_context().trace_id:032x}"))
        if message.text == "untraced":
            loop.call_soon_threadsafe(done.set)
        if message.text == "bad":
            if message.delivery_count == 1:
                raise ValueError("the body is bad")
            raise Reject("no such order")

    with Collector() as collector:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces")))
        (queue,) = declare_group(amqp_url, topic, "billing", 1)
        publish(amqp_url, queue)
        consumer = AmqpConsumer(
            topic,
            "billing",
            handle,
            amqp_url=amqp_url,
            retry_initial_seconds=0.05,
            tracing=Tracing(provider),
        )
        run = asyncio.create_task(consumer.run_async())
        await asyncio.wait_for(done.wait(), 20)
        consumer.stop()
        await run
        processes, acks, rejects = (collector.named(f"{verb} {topic}") for verb in ("process", "ack", "reject"))

    assert [body for body, _ in seen] == ["good", "bad", "bad", "untraced"]
    assert [trace_id for _, trace_id in seen] == [one.context[0] for one in processes]
    good, failed, bad, untraced = processes
    created = (TRACE_ID, SPAN_ID)
    assert {(one.context[0], one.parent, one.links) for one in (good, failed, bad)} == {(TRACE_ID, SPAN_ID, (created,))}
    assert (good.kind, untraced.parent, untraced.links) == (CONSUMER, "", ())
    assert good.attributes == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.consumer.group.name": "billing",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": "good",
        "popgate.delivery_count": 1,
    }
    assert [(one.is_error, one.attributes.get("error.type")) for one in processes] == [
        (False, None),
        (True, "ValueError"),
        (False, "Reject"),
        (False, None),
    ]
    ack, last = acks
    (reject,) = rejects
    assert (ack.kind, ack.parent, ack.links) == (CLIENT, SPAN_ID, (created, good.context))
    assert (last.parent, last.links) == ("", (untraced.context,))
    assert (reject.kind, reject.context[0], reject.links) == (CLIENT, TRACE_ID, (created, bad.context))
    assert {
        (one.attributes["messaging.system"], one.attributes["messaging.operation.type"]) for one in (ack, reject)
    } == {("rabbitmq", "settle")}
    assert not any("the body" in str(one) for one in processes)
