"""Consumers under load while the consume mode is switched, and the guarantees that must hold: no message is lost,
and the messages of each key are handled in order.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice

from popgate_client import Client, Consumer, Message, OutgoingMessage
from support.processes import wait_until

GROUP = "default"
QUEUES = 4
KEYS = 12
WAIT_SECONDS = 60
RUN_END_SECONDS = 40
"""Maximum seconds for a consumer to stop; longer than any stop takes."""


class Record:
    """The start and end time of each handler call; a message contains its key and number."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []
        self.doubled_at_once: list[str] = []
        self._running: set[str] = set()
        self._lock = threading.Lock()

    async def handle(self, message: Message) -> None:
        self._begin(message)
        await asyncio.sleep(0.002)
        self._end(message)

    def handle_plainly(self, message: Message) -> None:
        self._begin(message)
        time.sleep(0.002)
        self._end(message)

    def _begin(self, message: Message) -> None:
        with self._lock:
            if str(message.ordering_key) in self._running and not message.lease_lost:
                self.doubled_at_once.append(message.text)
            self._running.add(str(message.ordering_key))

    def _end(self, message: Message) -> None:
        with self._lock:
            self._running.discard(str(message.ordering_key))
            self.ended.append((str(message.ordering_key), int(message.text)))

    def handled(self) -> set[tuple[str, int]]:
        with self._lock:
            return set(self.ended)

    def out_of_order(self) -> list[tuple[str, int]]:
        """Return messages that were first handled after a later one of their key."""
        latest: dict[str, int] = {}
        found: list[tuple[str, int]] = []
        known: set[tuple[str, int]] = set()
        for key, number in self.ended:
            if (key, number) not in known and number < latest.get(key, -1):
                found.append((key, number))
            known.add((key, number))
            latest[key] = max(number, latest.get(key, -1))
        return found


class Load:
    """Publishes to every key in turn until it is stopped."""

    def __init__(self, client: Client, topic: str) -> None:
        self.published: set[tuple[str, int]] = set()
        self._client = client
        self._topic = topic
        self._over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            messages = [
                OutgoingMessage(body=str(number), ordering_key=f"k{key}", dedup_id=f"{key}-{number}")
                for key in range(KEYS)
            ]
            for result in self._client.publish(self._topic, *messages):
                result.raise_for_status()
            self.published |= {(f"k{key}", number) for key in range(KEYS)}
            number += 1
            time.sleep(0.02)

    def end(self) -> None:
        self._over.set()


@contextmanager
def under_load(urls: Sequence[str], topic: str) -> Generator[tuple[Client, Record, list[Consumer]]]:
    """Run a consumer at each URL, and a publisher at the first. At the end, every published message must be handled,
    in order for each key.
    """
    record = Record()
    consumers = [
        Consumer(topic, GROUP, handler, base_url=url, concurrency=8, invisibility_seconds=60)
        for url, handler in zip(urls, cycle([record.handle, record.handle_plainly]), strict=False)
    ]
    with Client(urls[0]) as client, ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        client.put_topic(topic, queues=QUEUES)
        client.put_group(topic, GROUP)
        load = Load(client, topic)
        publishing = threads.submit(load.run)
        stack.callback(load.end)
        for consumer in consumers:
            stack.enter_context(running(consumer))
        yield client, record, consumers
        load.end()
        publishing.result()
        wait_until(
            lambda: record.handled() >= load.published,
            timeout_seconds=WAIT_SECONDS,
            what=f"all to be handled; {len(load.published - record.handled())} of {len(load.published)} are not",
        )
        wait_until(lambda: is_empty(client, topic), timeout_seconds=WAIT_SECONDS, what="all to be settled")
    assert record.handled() == load.published
    assert record.out_of_order() == []


@contextmanager
def running(consumer: Consumer) -> Generator[None]:
    """Run it in a thread, and stop it at the end."""
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(consumer.run)
        try:
            yield
        finally:
            consumer.stop()
            wait([run], timeout=RUN_END_SECONDS)
            if not run.done():
                consumer.stop_now()
    run.result()


def is_empty(client: Client, topic: str) -> bool:
    state = client.stats(topic, GROUP)
    assert state["dead"] == 0
    return (state["ready"], state["in_flight"], state["delayed"]) == (0, 0, 0)


def switched(client: Client, topic: str, mode: str, consumers: list[Consumer], drain_seconds: float) -> None:
    """Switch the mode, and wait until every consumer works in it."""
    client.set_consume_mode(topic, GROUP, mode, drain_timeout_seconds=drain_seconds)
    wait_until(
        lambda: all(consumer.mode == mode for consumer in consumers),
        timeout_seconds=WAIT_SECONDS,
        what=f"mode {mode}, not {[consumer.mode for consumer in consumers]}",
    )


def modes(count: int) -> Iterator[str]:
    return islice(cycle(["pull", "pop"]), count)


def work_goes_on(record: Record, consumers: Sequence[Consumer], mode: str) -> None:
    """Return when more messages were handled, and every consumer got some by a pop or a pull, according to the mode."""
    before, got_before = len(record.ended), [_got(consumer, mode) for consumer in consumers]
    wait_until(
        lambda: (
            len(record.ended) > before + 50
            and all(_got(consumer, mode) > got for consumer, got in zip(consumers, got_before, strict=True))
        ),
        timeout_seconds=WAIT_SECONDS,
        what=f"everybody to work in {mode} mode, from {before} and {got_before}",
    )


def _got(consumer: Consumer, mode: str) -> int:
    return consumer.counters.popped if mode == "pop" else consumer.counters.pulled


def assert_only_cuts_doubled(record: Record, consumers: Sequence[Consumer]) -> None:
    """Assert that each message handled twice was interrupted, and that its consumer was notified."""
    doubled = sum(count - 1 for count in Counter(record.ended).values())
    assert doubled <= sum(consumer.counters.leases_lost for consumer in consumers)
