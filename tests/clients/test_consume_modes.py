"""Feature detection, each row of the compatibility table with real processes (decision 10).

client                  server       result
old (pull only)         new          pulls in pull mode, and is told `wrong_mode` otherwise; test_pull_with_curl.py
new                     new          follows the mode, and changes over at run time; also under load, in
                                     test_consume_modes_load.py
new                     old proxy    sees it in `GET /v1`, or by a 404, and does what that proxy supports
new, without a proxy    RabbitMQ     test_amqp_fallback.py
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias, Unpack

import httpx
import pytest

from popgate_client import Client, Consumer, Fenced, GroupSettings, Message, NotSupported, Reject, Retry, WrongMode
from support.processes import Server, wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]

WAIT_SECONDS = 20
GROUP = "default"
PULL_ONLY = "pull,msgpack,retry,ordering,delay,ttl,dedup,dead_letters,max_in_flight,pause,purge"
POP_ONLY = f"pop,attempt_id,filter,{PULL_ONLY.removeprefix('pull,')}"


class Shelf:
    """A handler that records its messages in order. `fails`: by body, how often it raises, and which error."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.messages: list[Message] = []
        self.fails: dict[str, list[BaseException]] = {}

    def handle(self, message: Message) -> None:
        self.bodies.append(message.text)
        self.messages.append(message)
        if errors := self.fails.get(message.text):
            raise errors.pop(0)

    def wait_for(self, *bodies: str) -> None:
        wait_until(
            lambda: set(bodies) <= set(self.bodies),
            timeout_seconds=WAIT_SECONDS,
            what=f"{bodies}, and not {self.bodies}",
        )


def make(client: Client, topic: str, *, queues: int = 2, **policy: Unpack[GroupSettings]) -> None:
    client.put_topic(topic, queues=queues)
    client.put_group(topic, GROUP, **policy)


def pull_mode(client: Client, topic: str) -> None:
    """Switch to this mode; existing leases are revoked."""
    client.set_consume_mode(topic, GROUP, "pull", drain_timeout_seconds=0)
    wait_until(
        lambda: bool(client.consume_mode(topic, GROUP)["converged"]), timeout_seconds=WAIT_SECONDS, what="pull mode"
    )


def follow(consumer: Consumer, mode: str) -> None:
    wait_until(lambda: consumer.mode == mode, timeout_seconds=WAIT_SECONDS, what=f"mode {mode}, not {consumer.mode}")


def is_settled(client: Client, topic: str) -> bool:
    state = client.stats(topic, GROUP)
    return (state["ready"], state["in_flight"], state["delayed"]) == (0, 0, 0)


def settled(client: Client, topic: str) -> None:
    wait_until(lambda: is_settled(client, topic), timeout_seconds=WAIT_SECONDS, what="all to be settled")


@pytest.fixture(scope="module")
def pull_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """An old proxy that supports only pull."""
    with ProxyProcess(tmp_path_factory.mktemp("old"), "--features", PULL_ONLY) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def pop_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """An old proxy without consume modes."""
    with ProxyProcess(tmp_path_factory.mktemp("older"), "--features", POP_ONLY) as proxy:
        yield proxy


# ---------------------------------------------------------------- an old client, a new server


def test_an_old_client_pulls_in_pull_mode_and_is_told_so_otherwise(client: Client, topic: str) -> None:
    make(client, topic, queues=1)
    client.publish(topic, "a", "b")
    with pytest.raises(WrongMode) as refused:
        client.assignment(topic, GROUP, "old-1", supports=["pull"])
    assert refused.value.mode == "pop"
    pull_mode(client, topic)
    mine = client.assignment(topic, GROUP, "old-1", supports=["pull"])
    assert (mine.mode, mine.queues) == ("pull", (0,))
    messages = client.pull(topic, GROUP, 0, "old-1", mine.generation, max_messages=10, wait_seconds=5)
    if len(messages) == 1:  # a pull does not wait for more than there is
        messages += client.pull(topic, GROUP, 0, "old-1", mine.generation, wait_seconds=5, after=messages[-1])
    assert [message.text for message in messages] == ["a", "b"]
    assert client.pull(topic, GROUP, 0, "old-1", mine.generation, after=messages[-1]) == []
    assert client.commit(topic, GROUP, 0, "old-1", mine.generation, messages[-1]) == 2
    client.leave(topic, GROUP, "old-1")
    with pytest.raises(Fenced):
        client.commit(topic, GROUP, 0, "old-1", mine.generation, messages[-1])


# ---------------------------------------------------------------- a new client, a new server


def test_a_new_client_follows_the_mode_and_changes_over_without_a_restart(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic)
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url)
    with running(consumer):
        client.publish(topic, "popped")
        shelf.wait_for("popped")
        assert (consumer.mode, consumer.queues) == ("pop", ())
        settled(client, topic)  # a switch without a time to drain cuts off what is not acked or committed
        pull_mode(client, topic)
        follow(consumer, "pull")
        client.publish(topic, "pulled 1", "pulled 2")
        shelf.wait_for("pulled 1", "pulled 2")
        assert consumer.queues == (0, 1)
        settled(client, topic)
        client.set_consume_mode(topic, GROUP, "pop")
        client.publish(topic, "popped again")
        shelf.wait_for("popped again")
        follow(consumer, "pop")
        settled(client, topic)
    counters = consumer.counters
    assert (counters.acked, counters.committed, counters.mode_changes, counters.leases_lost) == (2, 2, 2, 0)
    assert len(shelf.bodies) == 4


def test_a_consumer_that_starts_in_pull_mode_pulls_and_leaves_when_it_stops(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic)
    pull_mode(client, topic)
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url)
    client.publish(topic, "a", "b", "c")
    with running(consumer):
        shelf.wait_for("a", "b", "c")
    assert consumer.counters.popped == 0
    assert is_settled(client, topic), "what was done is committed before the end"
    began_at = time.monotonic()
    assert client.assignment(topic, GROUP, "next").queues == (0, 1)
    assert time.monotonic() - began_at < 2, "it left, so nobody waits for the end of its session"


def test_a_drain_back_to_pop_lets_handlers_finish_and_nothing_comes_twice(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic)
    pull_mode(client, topic)
    shelf = Shelf()

    def slowly(message: Message) -> None:
        shelf.handle(message)
        time.sleep(0.3)

    consumer = Consumer(topic, GROUP, slowly, base_url=shared_proxy.url)
    client.publish(topic, *map(str, range(20)))
    with running(consumer):
        shelf.wait_for("0", "1")
        client.set_consume_mode(topic, GROUP, "pop", drain_timeout_seconds=30)
        follow(consumer, "pop")
        shelf.wait_for(*map(str, range(20)))
        settled(client, topic)
    assert sorted(shelf.bodies, key=int) == [str(number) for number in range(20)]
    assert consumer.counters.leases_lost == 0


def test_a_message_that_fails_holds_up_its_queue_and_no_other(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic, queues=2)
    pull_mode(client, topic)
    shelf = Shelf()
    shelf.fails = {"bad": [ValueError("no"), Retry(0.1), SystemExit(3)], "worse": [Reject("never")]}
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url, retry_initial_seconds=0.05)
    client.publish(topic, "bad", "x", "worse", "y", "after", "z")  # every other one
    with running(consumer):
        shelf.wait_for("after", "x", "y", "z")
        settled(client, topic)
    by_queue: dict[int, list[tuple[str, int]]] = {}
    for message in shelf.messages:
        by_queue.setdefault(message.queue, []).append((message.text, message.delivery_count))
    assert sorted(by_queue.values(), key=len) == [
        [("x", 1), ("y", 1), ("z", 1)],
        [("bad", 1), ("bad", 2), ("bad", 3), ("bad", 4), ("worse", 1), ("after", 1)],
    ]
    assert (consumer.counters.failed, consumer.counters.rejected, consumer.counters.committed) == (2, 1, 5)
    (letter,) = client.dead_letters(topic, GROUP)["messages"]
    assert (letter["body"], letter["reason"]) == ("worse", "never")


def test_a_message_that_always_fails_is_dead_lettered_after_max_deliveries(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic, queues=1, max_deliveries=3)
    pull_mode(client, topic)
    shelf = Shelf()
    shelf.fails = {"poison": [ValueError("no") for _ in range(9)]}
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url, retry_initial_seconds=0.01)
    client.publish(topic, "before", "poison", "after")
    with running(consumer):
        shelf.wait_for("after")
        settled(client, topic)
    assert shelf.bodies == ["before", "poison", "poison", "poison", "after"]
    (letter,) = client.dead_letters(topic, GROUP)["messages"]
    assert (letter["body"], letter["reason"]) == ("poison", "max_deliveries: ValueError")
    assert (letter["cause"], letter["client"]) == ("max_deliveries", consumer.client_id)
    assert letter["error"] == {"type": "ValueError", "text": "no"}


def test_two_consumers_share_the_queues_and_each_queue_keeps_its_order_when_one_comes_and_goes(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic, queues=4)
    pull_mode(client, topic)
    shelf = Shelf()
    first, second = (Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url) for _ in range(2))
    count = 0

    def publish() -> None:
        nonlocal count
        for _ in range(5):
            client.publish(topic, *map(str, range(count, count + 40)))
            count += 40

    with running(first):
        wait_until(lambda: len(first.queues) == 4, timeout_seconds=WAIT_SECONDS, what="all queues")
        publish()
        with running(second):
            wait_until(
                lambda: len(first.queues) == len(second.queues) == 2, timeout_seconds=WAIT_SECONDS, what="two each"
            )
            publish()
        wait_until(lambda: len(first.queues) == 4, timeout_seconds=WAIT_SECONDS, what="all queues again")
        publish()
        shelf.wait_for(*map(str, range(count)))
        settled(client, topic)
    assert len(shelf.bodies) == count, "nobody was taken a queue from that was at work on it"
    for queue in range(4):
        numbers = [int(message.text) for message in shelf.messages if message.queue == queue]
        assert numbers == sorted(numbers)
    assert second.counters.handled > 0


def test_a_handler_that_hangs_makes_its_consumer_leave_so_that_another_one_goes_on(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic, queues=1)
    pull_mode(client, topic)
    shelf, other = Shelf(), Shelf()

    def hang(message: Message) -> None:
        shelf.handle(message)
        wait_until(lambda: bool(other.bodies), timeout_seconds=WAIT_SECONDS, what="the other one")

    hung = Consumer(
        topic, GROUP, hang, base_url=shared_proxy.url, invisibility_seconds=1, lease_seconds_max=1, drain_seconds=5
    )
    client.publish(topic, "a")
    with running(hung):
        shelf.wait_for("a")
        with running(Consumer(topic, GROUP, other.handle, base_url=shared_proxy.url)):
            other.wait_for("a")
            assert shelf.messages[0].lease_lost
            settled(client, topic)
    assert other.messages[0].delivery_count == 2


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_stop_lets_handlers_finish_and_leaves_those_that_outlast_it(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, kind: str
) -> None:
    make(client, topic, queues=2)
    pull_mode(client, topic)
    shelf, over = Shelf(), threading.Event()

    def plain(message: Message) -> None:
        shelf.handle(message)
        if "long" in message.text:
            over.wait(WAIT_SECONDS)
        time.sleep(0.3)

    async def asynchronous(message: Message) -> None:
        shelf.handle(message)
        await asyncio.sleep(WAIT_SECONDS if "long" in message.text else 0.3)

    handler = plain if kind == "plain" else asynchronous
    consumer = Consumer(topic, GROUP, handler, base_url=shared_proxy.url, drain_seconds=1)
    client.publish(topic, "long 1", "short 1", "long 2", "short 2")
    with running(consumer):
        shelf.wait_for("long 1", "short 1")
        stopped_at = time.monotonic()
        consumer.stop()
    assert 0.9 < time.monotonic() - stopped_at < 5
    assert set(shelf.bodies) == {"long 1", "short 1"}
    assert [bool(message.lease_lost) for message in shelf.messages if "long" in message.text] == [True]
    assert consumer.counters.committed == 1
    over.set()
    wait_until(lambda: client.stats(topic, GROUP)["in_flight"] == 0, timeout_seconds=WAIT_SECONDS, what="the returns")
    assert client.stats(topic, GROUP)["ready"] == 3


def test_a_stop_without_a_proxy_ends_soon(tmp_path: Path, topic: str, running: Running) -> None:
    finish, shelf = threading.Event(), Shelf()

    def handler(message: Message) -> None:
        shelf.handle(message)
        finish.wait(WAIT_SECONDS)

    with ProxyProcess(tmp_path / "proxy") as proxy, Client(proxy.url) as client:
        make(client, topic, queues=1)
        pull_mode(client, topic)
        client.publish(topic, "a")
        consumer = Consumer(topic, GROUP, handler, base_url=proxy.url)
        with running(consumer):
            shelf.wait_for("a")
            proxy.kill()
            finish.set()
            consumer.stop()
            stopped_at = time.monotonic()
        assert time.monotonic() - stopped_at < 10
        assert (consumer.counters.committed, consumer.counters.leases_lost) == (0, 1)


def test_a_cancelled_run_gives_back_what_it_had(shared_proxy: ProxyProcess, client: Client, topic: str) -> None:
    make(client, topic, queues=1)
    pull_mode(client, topic)
    client.publish(topic, "a")

    async def main() -> None:
        got = asyncio.Event()

        async def handler(_: Message) -> None:
            got.set()
            await asyncio.sleep(WAIT_SECONDS)

        running = asyncio.create_task(Consumer(topic, GROUP, handler, base_url=shared_proxy.url).run_async())
        await got.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert client.assignment(topic, GROUP, "next").queues == (0,)


PROGRAM = """
import sys, time
from popgate_client import Consumer
def handle(message):
    print(message.text, flush=True)
    time.sleep(0.5)
Consumer(sys.argv[1], "default", handle).run()
"""


class Program(Server):
    """A consumer as a process, which takes half a second for each message."""

    ready_timeout_seconds = stop_timeout_seconds = WAIT_SECONDS

    def __init__(self, folder: Path, topic: str, url: str) -> None:
        environment = {"POPGATE_URL": url, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        super().__init__("consumer", folder, arguments=[sys.executable, "-c", PROGRAM, topic], environment=environment)

    def _answers(self) -> bool:
        return bool(self.output)

    def handled(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.isdigit()]


def test_a_consumer_that_was_paused_for_longer_than_its_session_goes_on_with_nothing_that_others_have(
    tmp_path: Path, topic: str, running: Running
) -> None:
    with (
        ProxyProcess(tmp_path / "proxy", "--pull-session-seconds", "1") as proxy,
        Client(proxy.url) as client,
    ):
        make(client, topic, queues=1)
        pull_mode(client, topic)
        client.publish(topic, *map(str, range(12)))
        shelf = Shelf()
        with Program(tmp_path / "paused", topic, proxy.url) as paused:
            wait_until(lambda: len(paused.handled()) >= 3, timeout_seconds=WAIT_SECONDS, what="it to have a batch")
            paused.pause()
            with running(Consumer(topic, GROUP, shelf.handle, base_url=proxy.url)):
                shelf.wait_for("11")
                paused.resume()
                settled(client, topic)
                client.publish(topic, "12")
                shelf.wait_for("12")
                assert paused.stop() == 0
            before = paused.handled()
    assert len(set(before) & set(shelf.bodies)) <= 2, "what it was at, and what it had not committed yet"
    assert set(before) | set(shelf.bodies) == set(map(str, range(13)))


def test_with_a_filter_a_consumer_waits_for_pop_mode(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    make(client, topic)
    pull_mode(client, topic)
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=shared_proxy.url, filter={"kind": None})
    with running(consumer):
        follow(consumer, "pull")
        client.publish(topic, "a")
        client.set_consume_mode(topic, GROUP, "pop")
        shelf.wait_for("a")
    assert (consumer.counters.popped, consumer.counters.pulled) == (1, 0)


# ---------------------------------------------------------------- a new client, an old proxy


def test_from_an_old_proxy_without_pop_it_pulls(pull_only: ProxyProcess, topic: str, running: Running) -> None:
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=pull_only.url)
    with Client(pull_only.url) as client, running(consumer):
        with pytest.raises(NotSupported):
            client.pop(topic, GROUP)
        client.publish(topic, "a", "b")
        shelf.wait_for("a", "b")
        assert consumer.mode == "pull"
        settled(client, topic)
    assert (consumer.counters.committed, consumer.counters.calls_failed) == (2, 0)


def test_from_an_older_proxy_without_pull_it_pops_as_ever(pop_only: ProxyProcess, topic: str, running: Running) -> None:
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=pop_only.url)
    with Client(pop_only.url) as client, running(consumer):
        with pytest.raises(NotSupported):
            client.assignment(topic, GROUP, "me")
        client.publish(topic, "a", "b")
        shelf.wait_for("a", "b")
        assert consumer.mode == "pop"
        settled(client, topic)
    assert (consumer.counters.acked, consumer.counters.calls_failed) == (2, 0)


class Promising(httpx.AsyncHTTPTransport):
    """A load balancer whose `GET /v1` reaches a proxy with all features, while all other requests reach an old one."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1":
            return httpx.Response(200, json={"features": ["pop", "pull", "consume_mode"]})
        return await super().handle_async_request(request)


def test_a_404_on_the_assignment_tells_it_too(pop_only: ProxyProcess, topic: str, running: Running) -> None:
    shelf = Shelf()
    consumer = Consumer(topic, GROUP, shelf.handle, base_url=pop_only.url, transport=Promising())
    with Client(pop_only.url) as client, running(consumer):
        client.publish(topic, "a")
        shelf.wait_for("a")
        settled(client, topic)
    assert consumer.counters.acked == 1


def test_an_old_proxy_that_is_upgraded_under_a_consumer_can_be_switched_at_once(
    tmp_path: Path, topic: str, running: Running
) -> None:
    """A consumer that pulled because the proxy supported nothing else pops after the change, and pulls again later."""
    settings = tmp_path / "popgate.toml"
    settings.write_text(f'features = "{PULL_ONLY}"')
    shelf = Shelf()
    with ProxyProcess(tmp_path / "proxy", "--config", str(settings)) as proxy, Client(proxy.url) as client:
        make(client, topic)
        consumer = Consumer(topic, GROUP, shelf.handle, base_url=proxy.url)
        with running(consumer):
            client.publish(topic, "from the old")
            shelf.wait_for("from the old")
            settled(client, topic)
            settings.write_text("")
            proxy.restart()
            client.set_consume_mode(topic, GROUP, "pop")
            follow(consumer, "pop")
            client.publish(topic, "popped")
            shelf.wait_for("popped")
            client.set_consume_mode(topic, GROUP, "pull")
            follow(consumer, "pull")
            client.publish(topic, "pulled")
            shelf.wait_for("pulled")
    assert shelf.bodies == ["from the old", "popped", "pulled"]
