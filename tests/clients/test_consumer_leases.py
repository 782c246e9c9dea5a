"""A consumer extends its leases while handlers work, notices lost leases, and gives up on a hung handler."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import orjson
import pytest

from popgate.domain.features import ALL_FEATURES
from popgate_client import AsyncClient, Client, Consumer, GroupNotFound, Message, RequestInvalid
from popgate_client.popping import PendingPop
from popgate_client.subscription_calls import SubscriptionCalls
from support.processes import wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]

WAIT_SECONDS = 30


def publish(client: Client, topic: str, *texts: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    assert all(result.ok for result in client.publish(topic, *texts))


def bodies_of(requests: list[bytes], call: str) -> list[dict[str, Any]]:
    return [orjson.loads(request.partition(b"\r\n\r\n")[2]) for request in requests if f"/{call} ".encode() in request]


class Holding:
    """A handler that holds its messages until it is released."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.let_go = threading.Event()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self.let_go.wait(WAIT_SECONDS)


def test_leases_are_extended_while_handlers_work_longer_than_they_last(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    delivered: list[int] = []

    async def handler(message: Message) -> None:
        delivered.append(message.delivery_count)
        await asyncio.sleep(2.2)  # the work: more than two leases long

    consumer = Consumer(topic, "default", handler, base_url=shared_proxy.url, concurrency=20, invisibility_seconds=1)
    publish(client, topic, *map(str, range(20)))
    with running(consumer), Client(shared_proxy.url) as rival:
        wait_until(lambda: consumer.counters.popped == 20, timeout_seconds=WAIT_SECONDS, what="the pops")
        while consumer.counters.acked < 20:
            assert rival.pop(topic, "default", wait_seconds=0.5) == []
    assert delivered == [1] * 20
    assert consumer.counters.leases_lost == 0
    assert consumer.counters.extended >= 20 * 4
    assert client.stats(topic, "default")["in_flight"] == 0


def test_messages_that_wait_for_a_handler_are_extended_too(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    holding = Holding()
    consumer = Consumer(
        topic,
        "default",
        holding,
        base_url=shared_proxy.url,
        concurrency=1,
        buffer_messages_max=4,
        invisibility_seconds=1,
    )
    publish(client, topic, *"abcde")
    with running(consumer):
        wait_until(lambda: consumer.counters.extended >= 5 * 5, timeout_seconds=WAIT_SECONDS, what="the extensions")
        holding.let_go.set()
        wait_until(lambda: consumer.counters.acked == 5, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert [message.delivery_count for message in holding.messages] == [1] * 5
    assert [message.text for message in holding.messages] == list("abcde")


def test_a_handler_is_told_that_its_lease_is_lost_and_its_result_does_not_count(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    noticed: list[bool] = []
    taken = threading.Event()

    def handler(message: Message) -> None:
        if message.delivery_count == 1:
            # Another client ends the lease during the handler, as an expiry would.
            client.release(topic, "default", message, delay_seconds=0)
            (stolen,) = client.pop(topic, "default", wait_seconds=10, invisibility_seconds=600)
            assert stolen.delivery_count == 2
            taken.set()
            wait_until(lambda: bool(message.lease_lost), timeout_seconds=WAIT_SECONDS, what="the flag")
            noticed.append(message.lease_lost.is_set())

    consumer = Consumer(
        topic, "default", handler, base_url=shared_proxy.url, concurrency=1, invisibility_seconds=1, wait_seconds=1
    )
    publish(client, topic, "a")
    with running(consumer):
        wait_until(lambda: consumer.counters.handled == 1, timeout_seconds=WAIT_SECONDS, what="the handler")
    assert taken.is_set()
    assert noticed == [True]
    assert (consumer.counters.leases_lost, consumer.counters.acked) == (1, 0)
    assert client.stats(topic, "default")["in_flight"] == 1


# ---------------------------------------------------------------- the group's policy


def test_leases_are_as_long_as_the_group_says_and_extended_by_that(
    client: Client, topic: str, running: Running, wire_url: str, sent_requests: list[bytes]
) -> None:
    holding = Holding()
    publish(client, topic, "a")
    client.put_group(topic, "default", invisibility_seconds=1.5)
    consumer = Consumer(topic, "default", holding, base_url=wire_url)
    with running(consumer):
        wait_until(lambda: consumer.counters.extended >= 5, timeout_seconds=WAIT_SECONDS, what="the extensions")
        assert client.pop(topic, "default") == []
        holding.let_go.set()
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert [message.delivery_count for message in holding.messages] == [1]
    assert all("invisibility_seconds" not in body for body in bodies_of(sent_requests, "pop"))
    extensions = [entry for body in bodies_of(sent_requests, "extend") for entry in body["entries"]]
    assert {entry["invisibility_seconds"] for entry in extensions} == {1.5}


def test_a_policy_that_is_changed_holds_for_the_next_leases(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("popgate_client.lengths.POLICY_SECONDS", 0.0)
    holding = Holding()
    publish(client, topic, "a")
    client.put_group(topic, "default", invisibility_seconds=600)
    consumer = Consumer(topic, "default", holding, base_url=shared_proxy.url)
    with running(consumer), Client(shared_proxy.url) as rival:
        wait_until(lambda: len(holding.messages) == 1, timeout_seconds=WAIT_SECONDS, what="the first")
        client.put_group(topic, "default", invisibility_seconds=1)
        client.publish(topic, "b")
        wait_until(lambda: len(holding.messages) == 2, timeout_seconds=WAIT_SECONDS, what="the second")
        assert rival.pop(topic, "default", wait_seconds=2.5) == []
        holding.let_go.set()
        wait_until(lambda: consumer.counters.acked == 2, timeout_seconds=WAIT_SECONDS, what="the acks")
    assert consumer.counters.leases_lost == 0


def test_a_policy_that_can_never_be_read_costs_no_lease(
    shared_proxy: ProxyProcess,
    client: Client,
    topic: str,
    running: Running,
    wire_url: str,
    lose_answers: Callable[[str, Sequence[int]], None],
) -> None:
    """Messages that were popped are handled, and their leases are extended, at whatever length they have."""
    holding = Holding()
    publish(client, topic, "a", "b")
    client.put_group(topic, "default", invisibility_seconds=3)
    lose_answers("GET /v1/topics/", range(1, 1_000))
    consumer = Consumer(topic, "default", holding, base_url=wire_url)
    with running(consumer), Client(shared_proxy.url) as rival:
        wait_until(lambda: consumer.counters.extended >= 2, timeout_seconds=WAIT_SECONDS, what="the extensions")
        assert rival.pop(topic, "default", wait_seconds=4) == []
        holding.let_go.set()
        wait_until(lambda: consumer.counters.acked == 2, timeout_seconds=WAIT_SECONDS, what="the acks")
    assert [message.delivery_count for message in holding.messages] == [1, 1]
    assert consumer.counters.leases_lost == consumer.counters.calls_failed == 0


def test_a_stop_while_the_policy_is_read_gives_the_messages_back(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pop has taken acks along: they are settled already when it is repeated."""
    monkeypatch.setattr("popgate_client.lengths.POLICY_SECONDS", 0.0)
    transport = SlowPolicy(after=20)
    publish(client, topic, *map(str, range(60)))
    client.put_group(topic, "default", invisibility_seconds=600)
    consumer = Consumer(topic, "default", lambda _: None, base_url=shared_proxy.url, concurrency=1, transport=transport)
    with running(consumer):
        wait_until(transport.is_reading.is_set, timeout_seconds=WAIT_SECONDS, what="the slow read")
    assert transport.acks_with_pops > 0
    state = client.stats(topic, "default")
    assert (state["in_flight"], state["ready"]) == (0, 60 - consumer.counters.acked)


class SlowPolicy(httpx.AsyncHTTPTransport):
    """A server that does not answer reads of the policy after some."""

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self.is_reading = threading.Event()
        self.acks_with_pops = 0
        self._left = after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/pop"):
            self.acks_with_pops += b'"ack"' in request.content
        if request.method == "GET" and request.url.path.startswith("/v1/topics/"):
            self._left -= 1
            if self._left < 0 and self.acks_with_pops:
                self.is_reading.set()
                await asyncio.sleep(WAIT_SECONDS)
        return await super().handle_async_request(request)


def test_a_consumer_says_who_pops_where_the_server_takes_that(
    client: Client, topic: str, running: Running, wire_url: str, sent_requests: list[bytes]
) -> None:
    holding = Holding()
    holding.let_go.set()
    publish(client, topic, "a")
    consumer = Consumer(topic, "default", holding, base_url=wire_url)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert {body.get("client_id") for body in bodies_of(sent_requests, "pop")} == {consumer.client_id}


def test_a_consumer_does_not_say_so_where_the_server_would_refuse_it(
    tmp_path: Path, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the feature was announced: servers of two releases may share one address."""
    holding = Holding()
    holding.let_go.set()
    features = ",".join(one for one in ALL_FEATURES if one != "client_id")
    with ProxyProcess(tmp_path / "older", "--features", features) as proxy, Client(proxy.url) as client:
        publish(client, "t", "a")
        with pytest.raises(RequestInvalid, match="client_id"):
            client.pop("t", "default", client_id="ann")
        consumer = Consumer("t", "default", holding, base_url=proxy.url)
        with running(consumer):
            wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert consumer.counters.calls_failed == 0


async def test_a_pop_that_is_refused_for_its_name_is_repeated_without_it(tmp_path: Path) -> None:
    settings = tmp_path / "popgate.toml"
    settings.write_text("")
    with ProxyProcess(tmp_path / "proxy", "--config", str(settings)) as proxy, Client(proxy.url) as client:
        publish(client, "t", "a")
        async with AsyncClient(proxy.url) as caller:
            calls = SubscriptionCalls(caller, "t", "default", client_id="ann", invisibility_seconds=None, filter=None)
            assert "client_id" in await calls.features()
            settings.write_text(f"features = {[str(one) for one in ALL_FEATURES if one != 'client_id']}")
            await asyncio.to_thread(proxy.restart)
            (message,) = (await calls.pop(PendingPop(1), 5.0)).messages
            assert message.text == "a"


def test_a_policy_that_can_not_be_read_again_stays_as_it_was(
    client: Client,
    topic: str,
    running: Running,
    wire_url: str,
    lose_answers: Callable[[str, Sequence[int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("popgate_client.lengths.POLICY_SECONDS", 0.0)
    holding = Holding()
    holding.let_go.set()
    publish(client, topic, "a")
    lose_answers("GET /v1/topics/", range(2, 100))
    consumer = Consumer(topic, "default", holding, base_url=wire_url)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the first ack")
        client.publish(topic, "b", "c")
        wait_until(lambda: consumer.counters.acked == 3, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert [message.delivery_count for message in holding.messages] == [1] * 3


def test_a_policy_is_not_read_with_every_pop(
    client: Client, topic: str, running: Running, wire_url: str, sent_requests: list[bytes]
) -> None:
    holding = Holding()
    holding.let_go.set()
    publish(client, topic, *map(str, range(20)))
    consumer = Consumer(topic, "default", holding, base_url=wire_url, concurrency=1)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == 20, timeout_seconds=WAIT_SECONDS, what="all acks")
    assert sum(request.startswith(b"GET /v1/topics/") for request in sent_requests) == 1


def test_a_group_that_popping_creates_has_its_policy_read_afterwards(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    holding = Holding()
    holding.let_go.set()
    client.put_topic(topic, queues=1)
    consumer = Consumer(topic, "fresh", holding, base_url=shared_proxy.url)
    with running(consumer):
        wait_until(lambda: exists(client, topic, "fresh"), timeout_seconds=WAIT_SECONDS, what="the group")
        client.publish(topic, "a")
        wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert consumer.counters.calls_failed == 0


def exists(client: Client, topic: str, group: str) -> bool:
    with suppress(GroupNotFound):
        return bool(client.stats(topic, group))
    return False


# ---------------------------------------------------------------- leases that are lost


class Tap(httpx.AsyncHTTPTransport):
    """httpx' own transport, which also notes which lease each message came with."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[str, str] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path.endswith("/pop"):
            popped = orjson.loads(await response.aread())["messages"]
            self.handles |= {message["body"]: message["receipt_handle"] for message in popped}
        return response


def test_a_message_whose_lease_is_lost_before_its_turn_is_not_handled(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    holding = Holding()
    tap = Tap()
    consumer = Consumer(
        topic,
        "default",
        holding,
        base_url=shared_proxy.url,
        concurrency=1,
        buffer_messages_max=1,
        invisibility_seconds=1,
        transport=tap,
    )
    publish(client, topic, "a", "b")
    with running(consumer):
        wait_until(lambda: tap.handles.keys() == {"a", "b"}, timeout_seconds=WAIT_SECONDS, what="the pops")
        client.reject(topic, "default", tap.handles["b"])
        wait_until(lambda: consumer.counters.leases_lost == 1, timeout_seconds=WAIT_SECONDS, what="the loss")
        client.publish(topic, "c")
        holding.let_go.set()
        wait_until(lambda: consumer.counters.acked == 2, timeout_seconds=WAIT_SECONDS, what="the acks")
    assert [message.text for message in holding.messages] == ["a", "c"]


def test_a_hung_handler_loses_its_message_to_another_consumer(
    shared_proxy: ProxyProcess, client: Client, topic: str, running: Running
) -> None:
    hung = Holding()
    seen: list[int] = []
    hanging = Consumer(
        topic,
        "default",
        hung,
        base_url=shared_proxy.url,
        concurrency=1,
        invisibility_seconds=1,
        lease_seconds_max=2,
        drain_seconds=0,
    )
    working = Consumer(topic, "default", lambda message: seen.append(message.delivery_count), base_url=shared_proxy.url)
    publish(client, topic, "a")
    with running(hanging):
        wait_until(lambda: len(hung.messages) == 1, timeout_seconds=WAIT_SECONDS, what="the pop")
        hung_at = time.monotonic()
        with running(working):
            wait_until(lambda: working.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the other's ack")
        assert 2 <= time.monotonic() - hung_at < 10
        wait_until(hung.messages[0].lease_lost.is_set, timeout_seconds=WAIT_SECONDS, what="the flag")
    # The stop did not wait for the hung thread.
    assert not hung.let_go.is_set()
    assert seen == [2]
    assert (hanging.counters.leases_lost, hanging.counters.acked) == (1, 0)
    hung.let_go.set()


def test_leases_outlive_a_proxy_that_hangs_for_a_while(own_proxy: ProxyProcess, topic: str, running: Running) -> None:
    """The lease ends by the store's clock, and a late extension is granted if no other client has the message."""
    holding = Holding()
    consumer = Consumer(topic, "default", holding, base_url=own_proxy.url, invisibility_seconds=2)
    with Client(own_proxy.url) as client:
        publish(client, topic, "a")
        with running(consumer):
            wait_until(lambda: len(holding.messages) == 1, timeout_seconds=WAIT_SECONDS, what="the pop")
            own_proxy.pause()
            try:
                wait_until(lambda: consumer.counters.calls_failed > 0, timeout_seconds=WAIT_SECONDS, what="a failure")
            finally:
                own_proxy.resume()
            before = consumer.counters.extended
            wait_until(lambda: consumer.counters.extended > before, timeout_seconds=WAIT_SECONDS, what="an extension")
            holding.let_go.set()
            wait_until(lambda: consumer.counters.acked == 1, timeout_seconds=WAIT_SECONDS, what="the ack")
    assert [message.delivery_count for message in holding.messages] == [1]
    assert consumer.counters.leases_lost == 0
