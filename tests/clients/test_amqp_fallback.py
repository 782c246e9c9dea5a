"""Consumers change from a proxy to RabbitMQ itself and back: same messages, same handlers, and no message is lost."""

import os
import re
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika

from popgate_client import Client, Message, OutgoingMessage, Reject
from popgate_client.amqp import AmqpConsumer
from support.amqp_apps import declare_group
from support.processes import Server, wait_until
from support.proxy import ProxyProcess

PAGE = Path(__file__).parents[2] / "docs" / "amqp-fallback.md"
WAIT_SECONDS = 30


class Example(Server):
    """The page's program, unchanged except for its address."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 30

    def __init__(self, folder: Path, amqp_url: str) -> None:
        (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(text.replace("amqp://guest:guest@127.0.0.1:5672/", amqp_url))
        command = [sys.executable, "-u", str(program)]
        super().__init__("example", folder, arguments=command, environment=os.environ)

    def _answers(self) -> bool:
        return "hello" in self.output


@contextmanager
def in_a_thread(consumer: AmqpConsumer) -> Generator[None]:
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(consumer.run)
        try:
            yield
        finally:
            consumer.stop()
            run.result(WAIT_SECONDS)


def seen(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that a handler sees, except those that belong to its delivery."""
    return (
        message.topic,
        message.group,
        message.body,
        dict(message.headers),
        message.message_id,
        message.ordering_key,
        message.queue,
        message.published_at,
        message.delivery_count,
    )


def test_what_a_proxy_published_is_handled_without_it_and_what_was_rejected_then_it_lists(
    rabbit_proxy: ProxyProcess, amqp_url: str, topic: str
) -> None:
    outgoing = [
        OutgoingMessage(
            body=f"order {number}",
            headers={"kind": "express", "CC": "text", "number": 2.5, "none": None, "true": True},
            message_id=f"id-{number}",
            ordering_key=f"customer-{number}",
            delay_seconds=1 if number == 1 else None,
        )
        for number in range(4)
    ]
    outgoing.append(OutgoingMessage(body=b"\x00\xff bytes"))
    outgoing.append(OutgoingMessage(body="too late", ttl_seconds=1))
    by_proxy: list[Message] = []
    by_program: list[Message] = []
    with Client(rabbit_proxy.url) as client:
        client.put_topic(topic, queues=3)
        for group in ("over-http", "over-amqp"):
            client.put_group(topic, group)
        assert all(result.ok for result in client.publish(topic, *outgoing))
        time.sleep(1.0)  # the time to live of the last one, which began when it was published
        while len(by_proxy) < 5:
            by_proxy += client.pop(topic, "over-http", max_messages=10, wait_seconds=5)
    rabbit_proxy.stop()

    def handle(message: Message) -> None:
        by_program.append(message)
        if message.message_id == "id-2":
            raise Reject("nobody wants it") if message.delivery_count > 1 else LookupError("no such customer: ß")

    consumer = AmqpConsumer(
        topic, "over-amqp", handle, amqp_url=amqp_url, client_id="program-7", retry_initial_seconds=0.01
    )
    with in_a_thread(consumer):
        wait_until(lambda: len(by_program) == 6, timeout_seconds=WAIT_SECONDS, what="all to be handled")
        wait_until(
            lambda: (consumer.counters.acked, consumer.counters.rejected) == (4, 1),
            timeout_seconds=WAIT_SECONDS,
            what="all to be settled",
        )
    by_body = {message.body: seen(message)[2:] for message in by_proxy}
    firsts = [message for message in by_program if message.delivery_count == 1]
    assert {message.body: seen(message)[2:] for message in firsts} == by_body
    rabbit_proxy.start()
    with Client(rabbit_proxy.url) as client:
        (letter,) = client.dead_letters(topic, "over-amqp")["messages"]
        assert (letter["message_id"], letter["reason"], letter["delivery_count"]) == ("id-2", "nobody wants it", 2)
        assert letter["error"] == {"type": "LookupError", "text": "no such customer: ß"}
        first, second = letter["attempts"]
        assert letter["client"] == first["client"] == second["client"]
        assert letter["client"].startswith("program-7.")
        assert [(one["attempt"], one["outcome"]) for one in (first, second)] == [(1, "released"), (2, "rejected")]
        assert (first["error_type"], second["reason"]) == ("LookupError", "nobody wants it")
        assert first["leased_at"] <= first["ended_at"] <= second["leased_at"] <= letter["dead_lettered_at"]
        assert client.stats(topic, "over-amqp")["ready"] == 0
        client.redrive(topic, "over-amqp", wait_seconds=10)
        (again,) = client.pop(topic, "over-amqp", wait_seconds=10)
        assert again.headers == outgoing[2].headers
        assert again.ordering_key == outgoing[2].ordering_key


def test_the_program_of_the_page_runs_as_it_stands_and_ends_in_order(amqp_url: str, tmp_path: Path) -> None:
    queues = declare_group(amqp_url, "orders", "billing", 2)
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        connection.channel().basic_publish("", queues[1], b"hello")
    with Example(tmp_path / "example", amqp_url) as example:
        assert example.output == "hello {} None 1\n"
        assert example.stop() == 0
