"""Programs on bare RabbitMQ that share the queues of a group, and the analysis of the lines that they print."""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pika

from support.processes import Server, ServerFailedError, wait_until

PROGRAM = Path(__file__).with_name("amqp_program.py")
PUBLISH_SECONDS = 0.1
DELIVERY_LIMIT = 2_000_000_000
REJOIN_SECONDS = 30.0
STANDSTILL_SECONDS = 0.3
"""Seconds without any handled message that count as a stall of the machine; usually hundreds are handled a second."""


class Handled(NamedTuple):
    """One message that was handled, with the program's name and the time."""

    at: float
    app: str
    queue: int
    number: int


class AmqpApp(Server):
    """One program, as a context manager. `more` are arguments of `AmqpConsumer`."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 30

    def __init__(self, folder: Path, name: str, topic: str, group: str, **more: object) -> None:
        arguments = [sys.executable, str(PROGRAM), name, topic, group, json.dumps(more)]
        super().__init__(name, folder / name, arguments=arguments, environment=os.environ)

    def _answers(self) -> bool:
        return bool(self.lines())

    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines printed since the last start, without log lines."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith('{"at"') and line[-1] == "}"]

    def state(self) -> dict[str, Any]:
        """Return the last state that the program printed."""
        for line in reversed(self.output.splitlines()):
            if '"active"' in line and line[-1] == "}":
                state: dict[str, Any] = json.loads(line)
                return state
        unknown: dict[str, Any] = {"active": [], "absent": [], "members": [], "released": 0}
        return unknown

    def handled(self) -> list[Handled]:
        """Return the messages that the program has handled."""
        return [
            Handled(line["at"], self.name, line["queue"], int(line["handled"]))
            for line in self.lines()
            if "handled" in line
        ]


def declare_group(amqp_url: str, topic: str, group: str, queue_count: int) -> list[str]:
    """Declare the exchange and the queues as a proxy does."""
    queues = [f"popgate:{topic}:{group}:{index}" for index in range(queue_count)]
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        channel.exchange_declare(f"popgate:{topic}", "direct", durable=True)
        for index, queue in enumerate(queues):
            channel.queue_declare(queue, durable=True, arguments={**arguments, "x-single-active-consumer": True})
            channel.queue_bind(queue, f"popgate:{topic}", str(index))
        channel.queue_declare(f"popgate:{topic}:{group}:dead", durable=True, arguments=arguments)
    return queues


class Traffic:
    """Publishes to all queues until it is stopped; each queue's messages are numbered. `sent[queue][number]` is the
    time.
    """

    def __init__(self, amqp_url: str, topic: str, queue_count: int) -> None:
        self._url = amqp_url
        self._topic = topic
        self.sent: list[list[float]] = [[] for _ in range(queue_count)]
        self._stopped = threading.Event()

    @contextmanager
    def flowing(self) -> Generator["Traffic"]:
        thread = threading.Thread(target=self._publish, name="traffic")
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    def _publish(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            while not self._stopped.wait(PUBLISH_SECONDS):
                for queue, sent in enumerate(self.sent):
                    at = time.time()
                    channel.basic_publish(
                        f"popgate:{self._topic}",
                        str(queue),
                        str(len(sent)).encode(),
                        pika.BasicProperties(delivery_mode=2),
                        mandatory=True,
                    )
                    sent.append(at)
                connection.process_data_events(0)


def until_balanced(apps: Sequence[AmqpApp], queues: Sequence[str], *, timeout_seconds: float) -> float:
    """Return once each queue is consumed by one of `apps`, by their own account, and their queue counts differ by at
    most one. Then wait until every program is a waiting consumer of every queue. Returns the seconds until the
    balance.
    """

    def is_spread() -> bool:
        active = [app.state()["active"] for app in apps]
        lengths = [len(each) for each in active]
        return sorted(queue for each in active for queue in each) == sorted(queues) and max(lengths) - min(lengths) <= 1

    def is_whole() -> bool:
        return is_spread() and not any(app.state()["absent"] for app in apps)

    started = time.monotonic()
    try:
        wait_until(is_spread, timeout_seconds=timeout_seconds, what="balance")
        took = time.monotonic() - started
        wait_until(is_whole, timeout_seconds=REJOIN_SECONDS, what="all to be in line")
    except TimeoutError as error:
        states = "\n".join(f"{app.name}: {app.state()}" for app in apps)
        raise ServerFailedError(f"{error}:\n{states}") from error
    return took


# ---------------------------------------------------------------- judging


def lost(traffic: Traffic, handled: Sequence[Handled]) -> list[tuple[int, int]]:
    """Return the messages, by queue and number, that no program handled."""
    done = {(one.queue, one.number) for one in handled}
    return [
        (queue, number)
        for queue, sent in enumerate(traffic.sent)
        for number in range(len(sent))
        if (queue, number) not in done
    ]


def overtaken(handled: Sequence[Handled]) -> list[Handled]:
    """Return the messages that were first handled after a later message of the same queue."""
    highest: dict[int, int] = {}
    found: list[Handled] = []
    for one in sorted(handled):
        if one.number < highest.get(one.queue, -1) and not any(
            other.queue == one.queue and other.number == one.number and other.at < one.at for other in handled
        ):
            found.append(one)
        highest[one.queue] = max(one.number, highest.get(one.queue, -1))
    return found


def waits(traffic: Traffic, handled: Sequence[Handled]) -> list[tuple[float, int, float]]:
    """Return how many seconds each message waited until it was first handled, its queue, and its publish time.

    Periods in which no message of any queue was handled do not count: the machine was busy with other work.
    """
    first: dict[tuple[int, int], float] = {}
    moments = [one.at for one in sorted(handled)]
    for one in sorted(handled):
        first.setdefault((one.queue, one.number), one.at)
    still = [(start, end) for start, end in itertools.pairwise(moments) if end - start > STANDSTILL_SECONDS]
    found: list[tuple[float, int, float]] = []
    for (queue, number), at in first.items():
        sent_at = traffic.sent[queue][number]
        stood = sum(max(0.0, min(end, at) - max(start, sent_at)) for start, end in still)
        found.append((at - sent_at - stood, queue, sent_at))
    return found
