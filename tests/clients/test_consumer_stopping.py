"""How a consumer ends: no message is lost, unfinished messages are visible at once, and the end takes little time."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest

from popgate_client import Client, Consumer, LeasedMessage, Message, RequestInvalid
from support.processes import Server, wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]

WAIT_SECONDS = 30


def publish(client: Client, topic: str, count: int, *, retry_seconds: float = 0.0) -> None:
    client.put_topic(topic, queues=2)
    client.put_group(topic, "default", retry={"initial_seconds": retry_seconds})
    assert all(result.ok for result in client.publish(topic, *map(str, range(count))))


def ready_and_in_flight(client: Client, topic: str) -> tuple[int, int]:
    state = client.stats(topic, "default")
    assert state["dead"] == state["delayed"] == 0
    return state["ready"], state["in_flight"]


def ignore(_: Message) -> None:
    """Nothing to do."""


# ---------------------------------------------------------------- in this process


def test_a_stop_lets_handlers_finish_and_gives_the_rest_back_at_once(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    finish = threading.Event()

    def handler(_: Message) -> None:
        finish.wait(WAIT_SECONDS)

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=5, buffer_messages_max=10)
    publish(client, topic, 30, retry_seconds=60)  # what is given back must not take the group's delay for failures
    with running(consumer):
        wait_until(lambda: consumer.counters.popped == 15, timeout_seconds=WAIT_SECONDS, what="the pops")
        consumer.stop()
        wait_until(
            lambda: ready_and_in_flight(client, topic) == (25, 5), timeout_seconds=WAIT_SECONDS, what="what waited"
        )
        finish.set()
    assert ready_and_in_flight(client, topic) == (25, 0)
    assert (consumer.counters.acked, consumer.counters.released) == (5, 10)
    assert consumer.counters.settlements_abandoned == 0


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_handlers_that_outlast_the_drain_are_left_and_their_messages_given_back(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, kind: str
) -> None:
    messages: list[Message] = []
    cancelled: list[str] = []
    over = threading.Event()

    def plain(message: Message) -> None:
        messages.append(message)
        over.wait(WAIT_SECONDS)

    async def asynchronous(message: Message) -> None:
        messages.append(message)
        try:
            await asyncio.sleep(WAIT_SECONDS)
        except asyncio.CancelledError:
            cancelled.append(message.text)
            raise

    consumer = Consumer(
        topic,
        "default",
        plain if kind == "plain" else asynchronous,
        base_url=shared_proxy.url,
        concurrency=2,
        drain_seconds=0.2,
    )
    publish(client, topic, 3, retry_seconds=60)
    with running(consumer):
        wait_until(lambda: len(messages) == 2, timeout_seconds=WAIT_SECONDS, what="the handlers")
    assert ready_and_in_flight(client, topic) == (3, 0)
    assert all(message.lease_lost for message in messages)
    assert len(cancelled) == (2 if kind == "async" else 0)
    assert (consumer.counters.released, consumer.counters.acked) == (2, 0)
    over.set()


def test_a_stop_ends_a_long_poll_at_once_and_leaves_none_behind(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    consumer = Consumer(topic, "default", print, base_url=shared_proxy.url, wait_seconds=30)
    publish(client, topic, 0)
    with running(consumer):
        wait_until(lambda: parked_pops(shared_proxy, topic) == 1, timeout_seconds=WAIT_SECONDS, what="the long poll")
        stopped_at = time.monotonic()
        consumer.stop()
        consumer.stop()
    assert time.monotonic() - stopped_at < 3
    client.publish(topic, "a")
    (message,) = client.pop(topic, "default", wait_seconds=WAIT_SECONDS)
    assert message.delivery_count == 1


def parked_pops(proxy: ProxyProcess, topic: str) -> int:
    lines = proxy.client.get("/metrics").text.splitlines()
    mine = [line for line in lines if line.startswith("popgate_parked_pops") and f'"{topic}"' in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in mine)


def test_a_stop_while_messages_arrive_strands_none(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    """The stop hits pops at every moment: parked, being answered, answered."""
    publish(client, topic, 0)
    published = 0
    acked = 0
    with ThreadPoolExecutor(1) as threads:
        for round_number in range(15):
            consumer = Consumer(topic, "default", ignore, base_url=shared_proxy.url, concurrency=4)
            with running(consumer):
                wait_until(
                    lambda: parked_pops(shared_proxy, topic) == 1, timeout_seconds=WAIT_SECONDS, what="the long poll"
                )
                publishing = threads.submit(client.publish, topic, *map(str, range(1 + round_number)))
                time.sleep(0.0007 * round_number)  # not to wait for anything: to stop at a different moment each time
            published += len(publishing.result())
            acked += consumer.counters.acked
            ready, in_flight = ready_and_in_flight(client, topic)
            assert in_flight == 0, consumer.counters
            assert ready + acked == published, consumer.counters


class StuckPop(httpx.AsyncHTTPTransport):
    """The answer to the first pop with messages does not arrive, and the next connection is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self._was_reset = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_pop = request.url.path.endswith("/pop")
        if is_pop and self.is_stuck.is_set() and not self._was_reset:
            self._was_reset = True
            raise httpx.ReadError("reset")
        response = await super().handle_async_request(request)
        if is_pop and not self.is_stuck.is_set():
            await response.aread()
            self.is_stuck.set()
            await asyncio.sleep(WAIT_SECONDS)
        return response


def test_a_stop_asks_again_for_the_messages_of_an_interrupted_pop(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    publish(client, topic, 5)
    transport = StuckPop()
    consumer = Consumer(
        topic, "default", ignore, base_url=shared_proxy.url, invisibility_seconds=600, transport=transport
    )
    with running(consumer):
        wait_until(transport.is_stuck.is_set, timeout_seconds=WAIT_SECONDS, what="the pop")
    assert ready_and_in_flight(client, topic) == (5, 0)


def test_a_handler_may_stop_its_consumer(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    def stop_it(_: Message) -> None:
        consumer.stop()

    consumer = Consumer(topic, "default", stop_it, base_url=shared_proxy.url, concurrency=1)
    publish(client, topic, 5)
    with running(consumer) as run:
        run.result(timeout=WAIT_SECONDS)
    assert ready_and_in_flight(client, topic) == (4, 0)
    assert consumer.counters.acked == 1


async def test_a_consumer_that_was_stopped_before_it_ran_takes_nothing(
    shared_proxy: ProxyProcess, client: Client, topic: str
) -> None:
    publish(client, topic, 1)
    consumer = Consumer(topic, "default", print, base_url=shared_proxy.url)
    consumer.stop()
    await consumer.run_async()
    assert ready_and_in_flight(client, topic) == (1, 0)
    assert consumer.counters.popped == 0


async def test_a_cancelled_consumer_gives_everything_back(
    shared_proxy: ProxyProcess, client: Client, topic: str
) -> None:
    async def handler(_: Message) -> None:
        await asyncio.sleep(WAIT_SECONDS)

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=4, buffer_messages_max=3)
    publish(client, topic, 10)
    run = asyncio.create_task(consumer.run_async())
    await until(lambda: consumer.counters.popped == 7)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ready_and_in_flight(client, topic) == (10, 0)


async def test_stopping_now_gives_nothing_back(shared_proxy: ProxyProcess, client: Client, topic: str) -> None:
    async def handler(_: Message) -> None:
        await asyncio.sleep(WAIT_SECONDS)

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=4)
    publish(client, topic, 10)
    run = asyncio.create_task(consumer.run_async())
    await until(lambda: consumer.counters.popped == 4)
    consumer.stop_now()
    async with asyncio.timeout(5):
        await run
    assert ready_and_in_flight(client, topic) == (6, 4)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  # nothing tells that a counter has changed
            await asyncio.sleep(0.01)


def test_a_consumer_waits_for_a_topic_that_is_not_there_yet(tmp_path: Path, topic: str, running: Running) -> None:
    with ProxyProcess(tmp_path / "proxy", "--auto-create", "false") as proxy, Client(proxy.url) as client:
        consumer = Consumer(topic, "default", ignore, base_url=proxy.url)
        with running(consumer):
            wait_until(lambda: consumer.counters.calls_failed > 1, timeout_seconds=WAIT_SECONDS, what="refused pops")
            publish(client, topic, 3)
            wait_until(lambda: consumer.counters.acked == 3, timeout_seconds=WAIT_SECONDS, what="all acks")


def test_a_refusal_for_good_ends_the_consumer_with_the_reason(shared_proxy: ProxyProcess, running: Running) -> None:
    consumer = Consumer("no name", "default", print, base_url=shared_proxy.url)
    with pytest.raises(RequestInvalid) as caught, running(consumer) as run:
        run.exception(timeout=WAIT_SECONDS)
    assert caught.value.field == "topic"


# ---------------------------------------------------------------- in a process of its own

PROGRAM = """
import asyncio, logging, sys, time
from popgate_client import Consumer

logging.basicConfig(level="WARNING")
logging.getLogger("popgate_client").setLevel("INFO")
url, topic, kind, seconds, drain_seconds, buffered = sys.argv[1:]

def plain(message):
    print("got", message.text, flush=True)
    time.sleep(float(seconds))
    print("finished", message.text, flush=True)

async def asynchronous(message):
    print("got", message.text, flush=True)
    await asyncio.sleep(float(seconds))
    print("finished", message.text, flush=True)

handler = plain if kind == "plain" else asynchronous
consumer = Consumer(topic, "default", handler, base_url=url, concurrency=2, buffer_messages_max=int(buffered),
                    drain_seconds=float(drain_seconds), invisibility_seconds=2)
consumer.run()
print("ended", consumer.counters, flush=True)
"""


class ConsumerProcess(Server):
    """A program that consumes with two handlers, under leases of 2 s; ready once both handlers work."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(
        self,
        folder: Path,
        url: str,
        topic: str,
        *,
        kind: str,
        handler_seconds: float = 600,
        drain_seconds: float = 0,
        buffered: int = 0,
    ) -> None:
        options = map(str, (handler_seconds, drain_seconds, buffered))
        program = [sys.executable, "-X", "dev", "-c", PROGRAM]
        super().__init__("consumer", folder, arguments=[*program, url, topic, kind, *options])

    def _answers(self) -> bool:
        return self.output.count("got") == 2


@pytest.mark.parametrize(
    ("number", "kind", "handler_seconds", "drain_seconds", "done"),
    [
        (signal.SIGTERM, "plain", 0.5, 20, 2),
        (signal.SIGINT, "asynchronous", 0.5, 20, 2),
        (signal.SIGINT, "plain", 600, 0.1, 0),
        (signal.SIGTERM, "asynchronous", 600, 0.1, 0),
    ],
)
def test_a_signal_drains_the_process(
    shared_proxy: ProxyProcess,
    client: Client,
    topic: str,
    tmp_path: Path,
    number: signal.Signals,
    kind: str,
    handler_seconds: float,
    drain_seconds: float,
    done: int,
) -> None:
    publish(client, topic, 6, retry_seconds=60)
    with ConsumerProcess(
        tmp_path,
        shared_proxy.url,
        topic,
        kind=kind,
        handler_seconds=handler_seconds,
        drain_seconds=drain_seconds,
        buffered=1,
    ) as process:
        process.signal(number)
        assert process.wait(10) == 0, process.output
        assert ready_and_in_flight(client, topic) == (6 - done, 0), process.output
        assert process.output.count("finished") == done
        assert f"acked={done}," in process.output
        assert "Traceback" not in process.output
        assert "Warning" not in process.output


def test_a_second_signal_ends_the_process_at_once(
    shared_proxy: ProxyProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, 6)
    with ConsumerProcess(tmp_path, shared_proxy.url, topic, kind="plain", drain_seconds=600, buffered=1) as process:
        process.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in process.output, timeout_seconds=WAIT_SECONDS, what="the signal")
        wait_until(lambda: ready_and_in_flight(client, topic) == (4, 2), timeout_seconds=WAIT_SECONDS, what="the drain")
        assert process.is_running()
        process.signal(signal.SIGTERM)
        assert process.wait(5) == 0, process.output
        assert "Traceback" not in process.output
    # Nothing was given back: the leases end at their deadlines.
    assert ready_and_in_flight(client, topic) == (4, 2)


def test_a_process_that_was_killed_loses_its_messages_to_the_next_one(
    shared_proxy: ProxyProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, 2)
    with ConsumerProcess(tmp_path, shared_proxy.url, topic, kind="plain") as process:
        killed_at = time.monotonic()
        process.kill()
        seen: list[int] = []
        while len(seen) < 2:
            popped = client.pop(topic, "default", 2, wait_seconds=WAIT_SECONDS)
            assert popped, "the killed process' messages did not come back"
            seen += [message.delivery_count for message in popped]
    assert seen == [2, 2]
    assert time.monotonic() - killed_at < 2 + 2


def test_a_process_that_slept_through_its_leases_is_told_so(
    shared_proxy: ProxyProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, 2)
    with ConsumerProcess(tmp_path, shared_proxy.url, topic, kind="plain") as process:
        process.pause()
        popped: list[LeasedMessage] = []
        while len(popped) < 2:
            popped += client.pop(topic, "default", 2, wait_seconds=WAIT_SECONDS, invisibility_seconds=600)
        process.resume()
        wait_until(
            lambda: process.output.count("a lease was lost") == 2, timeout_seconds=WAIT_SECONDS, what="the losses"
        )
        assert process.stop() == 0
        assert "leases_lost=2," in process.output
        assert "released=0," in process.output
    assert [result.status for result in client.ack(topic, "default", popped)] == ["acked", "acked"]
