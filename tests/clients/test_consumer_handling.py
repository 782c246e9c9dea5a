"""What a handler's result means for its message, and how many handlers run at once."""

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from decimal import Decimal
from itertools import pairwise
from typing import Any, TypeAlias

import httpx
import orjson
import pytest

from popgate_client import Client, Consumer, Handler, Message, OutgoingMessage, Reject, Retry
from support.processes import wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]

MANY = 500
WAIT_SECONDS = 30


def publish(client: Client, topic: str, count: int = 1, *, queues: int = 2) -> None:
    """Messages "0", "1", ... for a group that is there before them."""
    client.put_topic(topic, queues=queues)
    client.put_group(topic, "default")
    assert all(result.ok for result in client.publish(topic, *map(str, range(count))))


def state_of(client: Client, topic: str) -> dict[str, int]:
    state = client.stats(topic, "default")
    return {name: state[name] for name in ("ready", "in_flight", "delayed", "dead")}


SETTLED = {"ready": 0, "in_flight": 0, "delayed": 0, "dead": 0}


class Gate:
    """A handler that counts its running calls, and lets none return until it is opened."""

    def __init__(self) -> None:
        self.inside = 0
        self.inside_max = 0
        self.opened = False
        self._lock = threading.Lock()

    def _enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.inside_max = max(self.inside_max, self.inside)

    def _leave(self) -> None:
        with self._lock:
            self.inside -= 1

    def plain(self, _: Message) -> None:
        self._enter()
        wait_until(lambda: self.opened, timeout_seconds=WAIT_SECONDS, what="the gate")
        self._leave()

    async def asynchronous(self, _: Message) -> None:
        self._enter()
        while not self.opened:  # noqa: ASYNC110  # another thread opens it
            await asyncio.sleep(0.01)
        self._leave()


class AsyncCallable:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.seen.append(message.text)


# ---------------------------------------------------------------- returns


@pytest.mark.parametrize("kind", ["async", "plain", "plain returning a coroutine", "async callable", "buffered"])
def test_every_message_is_handled_and_acked(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, kind: str
) -> None:
    asynchronous = AsyncCallable()
    handlers: dict[str, Handler] = {
        "async": asynchronous.__call__,
        "plain": lambda message: asynchronous.seen.append(message.text),
        "plain returning a coroutine": lambda message: asynchronous(message),  # noqa: PLW0108  # as users write
        "async callable": asynchronous,
        "buffered": asynchronous,
    }
    consumer = Consumer(
        topic,
        "default",
        handlers[kind],
        base_url=shared_proxy.url,
        concurrency=32,
        buffer_messages_max=200 if kind == "buffered" else 0,
    )
    publish(client, topic, MANY)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked >= MANY, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert Counter(asynchronous.seen) == Counter(map(str, range(MANY)))
    assert state_of(client, topic) == SETTLED
    assert consumer.counters.handled == consumer.counters.popped == MANY
    assert (consumer.counters.failed, consumer.counters.leases_lost, consumer.counters.released) == (0, 0, 0)


def test_a_consumer_empties_a_topic_on_rabbitmq(rabbit_proxy: ProxyProcess, topic: str, running: Running) -> None:
    seen: list[str] = []
    consumer = Consumer(
        topic, "default", lambda message: seen.append(message.text), base_url=rabbit_proxy.url, concurrency=32
    )
    with Client(rabbit_proxy.url) as client:
        publish(client, topic, MANY)
        with running(consumer):
            wait_until(lambda: consumer.counters.acked >= MANY, timeout_seconds=WAIT_SECONDS, what="all acks")
        assert Counter(seen) == Counter(map(str, range(MANY)))
        assert state_of(client, topic) == SETTLED


# ---------------------------------------------------------------- how many at once


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
@pytest.mark.parametrize("buffered", [0, 3])
def test_no_more_run_or_wait_than_was_said(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, kind: str, buffered: int
) -> None:
    gate = Gate()
    handler: Handler = gate.plain if kind == "plain" else gate.asynchronous
    consumer = Consumer(
        topic, "default", handler, base_url=shared_proxy.url, concurrency=4, buffer_messages_max=buffered
    )
    publish(client, topic, 20)
    with running(consumer):
        wait_until(
            lambda: gate.inside == 4 and consumer.counters.popped == 4 + buffered,
            timeout_seconds=WAIT_SECONDS,
            what="all places to be taken",
        )
        assert state_of(client, topic) == {**SETTLED, "ready": 16 - buffered, "in_flight": 4 + buffered}
        gate.opened = True
        wait_until(lambda: consumer.counters.acked == 20, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert gate.inside_max == 4


async def test_a_message_that_comes_twice_takes_two_places() -> None:
    lease = {"receipt_handle": "h", "body": "", "queue": 0, "delivery_count": 1, "first_delivered_at": 0}
    gate, pops = Gate(), 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal pops
        pops += request.url.path.endswith("/pop")
        messages = [lease, lease] if pops == 1 else []
        return httpx.Response(200, json={"features": ["pop"], "messages": messages, "results": [{"status": "acked"}]})

    consumer = Consumer(
        "t", "g", gate.asynchronous, concurrency=2, invisibility_seconds=60, transport=httpx.MockTransport(answer)
    )
    run = asyncio.create_task(consumer.run_async())
    async with asyncio.timeout(WAIT_SECONDS):
        while gate.inside < 2:  # noqa: ASYNC110  # the gate is for threads, too
            await asyncio.sleep(0)
        for _ in range(100):  # enough turns for another pop
            await asyncio.sleep(0)
        assert pops == 1
        gate.opened = True
        consumer.stop()
        await run


def test_plain_handlers_run_side_by_side_in_threads_that_are_kept(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    together = threading.Barrier(4)
    threads: set[int] = set()

    def handler(_: Message) -> None:
        threads.add(threading.get_ident())
        together.wait(WAIT_SECONDS)

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=4)
    publish(client, topic, 40)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 40, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert len(threads) == 4
    assert threading.get_ident() not in threads


# ---------------------------------------------------------------- raises


def test_a_failed_message_comes_back_after_growing_delays(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    deliveries: list[tuple[int, float]] = []

    def handler(message: Message) -> None:
        deliveries.append((message.delivery_count, time.monotonic()))
        if message.delivery_count < 4:
            raise ValueError(f"the body is {message.text}")

    consumer = Consumer(
        topic, "default", handler, base_url=shared_proxy.url, retry_initial_seconds=0.1, retry_multiplier=3.0
    )
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    client.publish(topic, "secret")
    with running(consumer), caplog.at_level(logging.ERROR, logger="popgate_client"):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")

    assert [count for count, _ in deliveries] == [1, 2, 3, 4]
    moments = [moment for _, moment in deliveries]
    gaps = [after - before for before, after in pairwise(moments)]
    for gap, delay in zip(gaps, [0.1, 0.3, 0.9], strict=True):
        assert gap >= delay
    assert (consumer.counters.failed, consumer.counters.released, consumer.counters.handled) == (3, 3, 1)
    failures = [record for record in caplog.records if record.name == "popgate_client.working"]
    (message_id,) = {vars(record)["message_id"] for record in failures}
    assert [record.getMessage() for record in failures] == [
        f"the handler failed: topic={topic} group=default url={shared_proxy.url} message_id={message_id} "
        f"delivery_count={count} cause=ValueError"
        for count in (1, 2, 3)
    ]
    assert vars(failures[0])["delivery_count"] == 1
    assert failures[0].exc_info is not None


def test_retry_says_when_the_message_comes_back(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    moments: list[float] = []

    async def handler(message: Message) -> None:
        moments.append(time.monotonic())
        if message.delivery_count == 1:
            raise Retry(0.7, "too early")

    # A failure would come back at once: the delay is the one that Retry says.
    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, retry_initial_seconds=0)
    publish(client, topic)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert moments[1] - moments[0] >= 0.7
    assert (consumer.counters.released, consumer.counters.failed) == (1, 0)


def test_a_rejected_message_is_a_dead_letter(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    def handler(message: Message) -> None:
        if message.text == "1":
            raise Reject("no use")

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url)
    publish(client, topic, 3)
    with running(consumer):
        wait_until(
            lambda: (consumer.counters.acked, consumer.counters.rejected) == (2, 1),
            timeout_seconds=WAIT_SECONDS,
            what="the settlements",
        )
    assert state_of(client, topic) == {**SETTLED, "dead": 1}
    assert consumer.counters.failed == 0


def test_a_message_that_always_fails_ends_as_a_dead_letter(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default", max_deliveries=3)
    client.publish(topic, "poison")
    seen: list[int] = []

    def handler(message: Message) -> None:
        seen.append(message.delivery_count)
        raise RuntimeError

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, retry_initial_seconds=0)
    with running(consumer):
        wait_until(lambda: state_of(client, topic)["dead"] == 1, timeout_seconds=WAIT_SECONDS, what="the dead letter")
    assert seen == [1, 2, 3]
    assert state_of(client, topic) == {**SETTLED, "dead": 1}


def leave(_: Message) -> None:
    sys.exit(3)


class Panic(BaseException):
    """As the panics of extensions in Rust are."""


def panic(_: Message) -> None:
    raise Panic


def stop_iteration(_: Message) -> None:
    raise StopIteration


def retry_beyond_all_limits(_: Message) -> None:
    raise Retry(1e9)


async def leave_asynchronously(_: Message) -> None:
    sys.exit(3)


async def cancel_itself(_: Message) -> None:
    raise asyncio.CancelledError


async def time_out(_: Message) -> None:
    async with asyncio.timeout(0):
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    "ending", [leave, panic, stop_iteration, retry_beyond_all_limits, leave_asynchronously, cancel_itself, time_out]
)
def test_however_strangely_a_handler_ends_its_message_comes_back_and_the_others_go_on(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, ending: Callable[[Message], Any]
) -> None:
    def handler(message: Message) -> Any:
        return ending(message) if message.text == "1" and message.delivery_count == 1 else None

    async def asynchronous(message: Message) -> None:
        if message.text == "1" and message.delivery_count == 1:
            await ending(message)

    consumer = Consumer(
        topic,
        "default",
        asynchronous if inspect.iscoroutinefunction(ending) else handler,
        base_url=shared_proxy.url,
        retry_initial_seconds=0,
    )
    publish(client, topic, 3)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 3, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert (consumer.counters.failed, consumer.counters.released) == (1, 1)
    assert state_of(client, topic) == SETTLED


class HalfMade(Reject):
    def __init__(self) -> None:
        """Forgets what every Reject has."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("make", "counted"),
    [
        (lambda: Reject(ValueError("no use")), "rejected"),
        (lambda: Reject(None), "rejected"),
        (lambda: Retry(0, ValueError("too early")), "released"),
        (lambda: Retry(0, reason={"an": "object"}), "released"),
        (lambda: Retry(Decimal(0)), "released"),  # type: ignore[arg-type]  # as users write
        (HalfMade, "failed"),
        (lambda: Reject(Unspeakable()), "failed"),
    ],
)
def test_whatever_a_reason_is_the_consumer_goes_on(
    shared_proxy: ProxyProcess,
    client: Client,
    topic: str,
    running: Running,
    make: Callable[[], Exception],
    counted: str,
) -> None:
    def handler(message: Message) -> None:
        if message.text == "1" and message.delivery_count == 1:
            raise make()

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url)
    publish(client, topic, 3)
    acked = 2 if counted == "rejected" else 3
    with running(consumer):
        wait_until(
            lambda: consumer.counters.acked == acked and getattr(consumer.counters, counted) == 1,
            timeout_seconds=WAIT_SECONDS,
            what="the settlements",
        )
    assert consumer.counters.failed == int(counted == "failed")
    assert state_of(client, topic) == {**SETTLED, "dead": int(counted == "rejected")}


# ---------------------------------------------------------------- the group's retry policy


def releases(requests: list[bytes]) -> list[dict[str, Any]]:
    bodies = [request.partition(b"\r\n\r\n")[2] for request in requests if b"/release " in request]
    return [entry for body in bodies for entry in orjson.loads(body)["entries"]]


def test_a_failed_message_stays_away_for_as_long_as_the_group_says(
    client: Client, topic: str, running: Running, wire_url: str, sent_requests: list[bytes]
) -> None:
    moments: list[float] = []

    def handler(message: Message) -> None:
        moments.append(time.monotonic())
        if message.delivery_count < 3:
            raise ValueError

    client.put_topic(topic, queues=1)
    client.put_group(topic, "default", retry={"initial_seconds": 0.3, "multiplier": 2})
    client.publish(topic, "a")
    consumer = Consumer(topic, "default", handler, base_url=wire_url, retry_initial_seconds=None)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    gaps = [after - before for before, after in pairwise(moments)]
    for gap, delay in zip(gaps, [0.3, 0.6], strict=True):
        assert gap >= delay
    cause = {"reason", "error", "client_id"}
    assert [set(entry) for entry in releases(sent_requests)] == [{"receipt_handle", *cause}] * 2


@pytest.mark.parametrize(
    ("option", "delay"),
    [({}, 1), ({"retry_initial_seconds": 0.2}, 0.2), ({"retry_multiplier": 3}, 1)],
)
def test_a_failed_message_stays_away_for_as_long_as_the_consumer_says_whatever_its_group_does(
    client: Client,
    topic: str,
    running: Running,
    wire_url: str,
    sent_requests: list[bytes],
    option: dict[str, float],
    delay: float,
) -> None:
    def handler(message: Message) -> None:
        if message.delivery_count == 1:
            raise ValueError

    client.put_topic(topic, queues=1)
    client.put_group(topic, "default", retry={"initial_seconds": 600})
    client.publish(topic, "a")
    consumer = Consumer(topic, "default", handler, base_url=wire_url, **option)  # type: ignore[arg-type]  # numbers
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert [entry["delay_seconds"] for entry in releases(sent_requests)] == [delay]


# ---------------------------------------------------------------- the object


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"buffer_messages_max": -1},
        {"drain_seconds": -1},
        {"invisibility_seconds": 0},
        {"invisibility_seconds": 0.5},
        {"invisibility_seconds": 43_201, "lease_seconds_max": 50_000},
        {"wait_seconds": 31},
        {"lease_seconds_max": 0.5},
        {"lease_seconds_max": 10, "invisibility_seconds": 30},
        {"retry_initial_seconds": -1},
        {"retry_initial_seconds": 400},
        {"retry_multiplier": 0.5},
        {"retry_delay_seconds_max": 50_000},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Consumer("t", "g", print, **options)


async def test_a_consumer_runs_once(shared_proxy: ProxyProcess, topic: str) -> None:
    consumer = Consumer(topic, "default", print, base_url=shared_proxy.url)
    consumer.stop()
    await consumer.run_async()
    with pytest.raises(RuntimeError):
        await consumer.run_async()


def test_messages_of_one_ordering_key_are_handled_one_after_the_other_and_others_meanwhile(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    """A message that fails is delivered again before all messages behind it, which were released with it."""
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    keyed = [OutgoingMessage(body=f"{key}{number}", ordering_key=key) for number in range(5) for key in "ab"]
    assert all(result.ok for result in client.publish(topic, *keyed))
    handled: dict[str, list[str]] = {"a": [], "b": []}
    at_work: set[str] = set()
    most = 0

    async def handler(message: Message) -> None:
        nonlocal most
        assert message.ordering_key not in at_work
        at_work.add(str(message.ordering_key))
        most = max(most, len(at_work))
        await asyncio.sleep(0.02)
        at_work.remove(str(message.ordering_key))
        if message.text == "a1" and message.delivery_count == 1:
            raise ValueError
        handled[str(message.ordering_key)].append(message.text)

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=10, retry_initial_seconds=0.1)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 10, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert handled == {key: [f"{key}{number}" for number in range(5)] for key in "ab"}
    assert (most, consumer.counters.failed) == (2, 1)
