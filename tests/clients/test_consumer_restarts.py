"""A consumer survives a proxy that is killed or restarted under load."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias

import httpx
import orjson
import pytest

from popgate_client import Client, Consumer, Handler, Message
from support.processes import wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]

MESSAGES = 300
"""Number of messages for each end of the proxy."""
WAIT_SECONDS = 60


class Witness(httpx.AsyncHTTPTransport):
    """httpx' own transport, which also notes every lease whose ack was answered `acked`."""

    def __init__(self, acked: set[str]) -> None:
        super().__init__()
        self._acked = acked

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path.endswith("/ack") and response.status_code == 200:
            handles = orjson.loads(request.content)["receipt_handles"]
            results = orjson.loads(await response.aread())["results"]
            for handle, result in zip(handles, results, strict=True):
                if result["status"] in ("acked", "already_acked"):
                    self._acked.add(handle)
        return response


class Ledger:
    """What was handled, and whether a message came again after its ack had been answered."""

    def __init__(self) -> None:
        self.handled: Counter[str] = Counter()
        self.broken: list[str] = []
        self.acked_handles: set[str] = set()
        self._handles: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def note(self, message: Message) -> None:
        with self._lock:
            earlier = self._handles.setdefault(message.text, [])
            if any(handle in self.acked_handles for handle in earlier):
                self.broken.append(message.text)
            earlier.append(message.receipt_handle)
            self.handled[message.text] += 1

    async def handle(self, message: Message) -> None:
        self.note(message)
        await asyncio.sleep(0.005)

    def handle_plainly(self, message: Message) -> None:
        self.note(message)


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_consumers_ride_out_a_proxy_that_ends_under_load(
    killable_proxy: ProxyProcess, topic: str, running: Running, seed: int, full_run: bool, ending: str
) -> None:
    """Every message is handled once: leases outlive the proxy, pops and acks are repeated until they are answered."""
    chance = random.Random(seed)
    rounds = 10 if full_run else 1
    messages = MESSAGES * (rounds + 1)
    ledger = Ledger()
    handlers: list[Handler] = [ledger.handle, ledger.handle, ledger.handle_plainly]
    consumers = [
        Consumer(
            topic,
            "default",
            handler,
            base_url=killable_proxy.url,
            concurrency=8,
            buffer_messages_max=8,
            invisibility_seconds=60,  # so that no lease ends meanwhile: nothing may be handled twice
            transport=Witness(ledger.acked_handles),
        )
        for handler in handlers
    ]
    with Client(killable_proxy.url) as client:
        client.put_topic(topic, queues=2)
        client.put_group(topic, "default")
        assert all(result.ok for result in client.publish(topic, *map(str, range(messages))))
        with ExitStack() as stack:
            for consumer in consumers:
                stack.enter_context(running(consumer))
            for number in range(1, rounds + 1):
                enough = number * MESSAGES + chance.randint(-100, 100)
                wait_until(
                    lambda: ledger.handled.total() >= enough,  # noqa: B023  # called at once
                    timeout_seconds=WAIT_SECONDS,
                    what="handlers to work",
                )
                if ending == "kill":
                    killable_proxy.kill()
                else:
                    killable_proxy.stop()
                killable_proxy.start()
            wait_until(
                lambda: sum(consumer.counters.acked for consumer in consumers) >= messages,
                timeout_seconds=WAIT_SECONDS,
                what="all acks",
            )
        state = client.stats(topic, "default")
    assert ledger.broken == [], "handed out again after its ack was answered"
    assert ledger.handled == Counter(map(str, range(messages)))
    assert (state["ready"], state["in_flight"], state["dead"]) == (0, 0, 0)
    assert sum(consumer.counters.leases_lost for consumer in consumers) == 0


def test_answers_that_are_lost_cost_nothing_but_time(
    client: Client,
    topic: str,
    running: Running,
    wire_url: str,
    lose_answers: Callable[[str, Sequence[int]], None],
    seed: int,
) -> None:
    chance = random.Random(seed)
    for verb in ("/pop", "/ack", "/release", "/extend"):
        lose_answers(verb, chance.sample(range(1, 12), 5))
    ledger = Ledger()

    async def handler(message: Message) -> None:
        ledger.note(message)
        await asyncio.sleep(0.5 if message.text == "0" else 0)
        if message.delivery_count == 1 and int(message.text) % 10 == 0:
            raise ValueError

    consumer = Consumer(
        topic,
        "default",
        handler,
        base_url=wire_url,
        concurrency=4,
        invisibility_seconds=60,
        retry_initial_seconds=0,
        transport=Witness(ledger.acked_handles),
    )
    client.put_topic(topic, queues=2)
    client.put_group(topic, "default")
    client.publish(topic, *map(str, range(100)))
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 100, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert ledger.broken == []
    assert ledger.handled == Counter({str(number): 2 if number % 10 == 0 else 1 for number in range(100)})
    assert consumer.counters.calls_failed >= 10
    state = client.stats(topic, "default")
    assert (state["ready"], state["in_flight"], state["delayed"], state["dead"]) == (0, 0, 0, 0)


def test_a_stop_without_a_proxy_ends_soon_and_says_what_it_could_not_deliver(
    own_proxy: ProxyProcess, topic: str, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    finish = threading.Event()
    consumer = Consumer(
        topic, "default", lambda _: finish.wait(WAIT_SECONDS), base_url=own_proxy.url, invisibility_seconds=1
    )
    with Client(own_proxy.url) as client:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "default")
        client.publish(topic, "a")
        with running(consumer):
            wait_until(lambda: consumer.counters.popped == 1, timeout_seconds=WAIT_SECONDS, what="the pop")
            own_proxy.kill()
            finish.set()
            consumer.stop()
            stopped_at = time.monotonic()
        assert time.monotonic() - stopped_at < 15
        assert (consumer.counters.acked, consumer.counters.settlements_abandoned) == (0, 1)
        assert any("abandoned" in record.getMessage() for record in caplog.records)
        own_proxy.start()
        (message,) = client.pop(topic, "default", wait_seconds=30)
        assert message.delivery_count == 2
