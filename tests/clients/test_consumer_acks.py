"""How a consumer sends its acks: with the next pop if the server accepts them there, and by themselves otherwise."""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest

from popgate_client import Client, Consumer
from popgate_client.counters import Counters
from popgate_client.errors import error_from
from popgate_client.handling import Settlement
from popgate_client.leases import SettleCall
from popgate_client.lengths import LeaseLength
from popgate_client.message import SettleEntry, SettleResult, Verb
from popgate_client.settling import Settler
from popgate_client.wire import retry_after_seconds
from support.processes import wait_until
from support.proxy import ProxyProcess

Running: TypeAlias = Callable[[Consumer], AbstractContextManager[Future[None]]]
MANY = 100
WAIT_SECONDS = 30
SETTLED = {"ready": 0, "in_flight": 0, "delayed": 0, "dead": 0}


def publish(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    assert all(result.ok for result in client.publish(topic, *map(str, range(MANY))))


def is_settled(client: Client, topic: str) -> bool:
    state = client.stats(topic, "default")
    return {name: state[name] for name in SETTLED} == SETTLED


def count(requests: Sequence[bytes], path: bytes, content: bytes = b"") -> int:
    return sum(path in request and content in request for request in list(requests))


def test_acks_go_with_the_next_pop(
    client: Client, topic: str, running: Running, wire_url: str, sent_requests: list[bytes]
) -> None:
    publish(client, topic)
    consumer = Consumer(topic, "default", lambda _: None, base_url=wire_url, concurrency=10, wait_seconds=1)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == MANY, timeout_seconds=WAIT_SECONDS, what="the acks")
    assert is_settled(client, topic)
    assert consumer.counters.leases_lost == consumer.counters.settlements_abandoned == 0
    assert count(sent_requests, f"/{topic}/groups/default/pop".encode(), b'"ack"') >= 3


def test_the_acks_of_a_pop_whose_answer_is_lost_are_made_once(
    client: Client, topic: str, running: Running, wire_url: str, lose_answers: Callable[[str, Sequence[int]], None]
) -> None:
    publish(client, topic)
    lose_answers("pop", [3, 5, 6])
    consumer = Consumer(topic, "default", lambda _: None, base_url=wire_url, concurrency=10, wait_seconds=1)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == MANY, timeout_seconds=WAIT_SECONDS, what="the acks")
    assert is_settled(client, topic)
    assert consumer.counters.calls_failed
    assert consumer.counters.handled == MANY
    assert consumer.counters.leases_lost == consumer.counters.settlements_abandoned == 0


def test_a_stop_during_a_long_poll_keeps_no_ack_back(client: Client, topic: str, running: Running, url: str) -> None:
    publish(client, topic)
    consumer = Consumer(topic, "default", lambda _: None, base_url=url, concurrency=10, wait_seconds=20)
    with running(consumer):
        wait_until(lambda: consumer.counters.handled == MANY, timeout_seconds=WAIT_SECONDS, what="the handlers")
        wait_until(lambda: is_settled(client, topic), timeout_seconds=5, what="the acks, though a pop waits")
    assert consumer.counters.acked == MANY
    assert consumer.counters.settlements_abandoned == 0


def test_the_results_of_acks_do_not_wait_for_a_message(client: Client, topic: str, running: Running, url: str) -> None:
    """A pop that takes acks along may wait long, or its connection may be dead: the acks are sent without it, too."""
    publish(client, topic)
    consumer = Consumer(topic, "default", lambda _: None, base_url=url, concurrency=10, wait_seconds=20)
    with running(consumer):
        wait_until(lambda: consumer.counters.acked == MANY, timeout_seconds=10, what="the results of all acks")
    assert consumer.counters.leases_lost == consumer.counters.settlements_abandoned == 0


def test_a_server_that_can_not_ack_with_a_pop_gets_acks_by_themselves(
    tmp_path: Path, topic: str, running: Running
) -> None:
    features = "pop,attempt_id,client_id,retry,ordering"
    with ProxyProcess(tmp_path, "--features", features) as proxy, Client(proxy.url) as client:
        publish(client, topic)
        consumer = Consumer(topic, "default", lambda _: None, base_url=proxy.url, concurrency=10, wait_seconds=1)
        with running(consumer):
            wait_until(lambda: consumer.counters.acked == MANY, timeout_seconds=WAIT_SECONDS, what="the acks")
        assert is_settled(client, topic)
        assert consumer.counters.calls_failed == 0


async def test_an_ack_is_repeated_before_its_lease_ends_whatever_pause_a_gateway_asks_for() -> None:
    tries: list[Verb] = []
    was_repeated = asyncio.Event()

    async def call(verb: Verb, entries: Sequence[SettleEntry]) -> list[SettleResult]:
        tries.append(verb)
        if len(tries) == 1:
            raise error_from({}, status=503, retry_after_seconds=3_600)
        was_repeated.set()
        return [SettleResult(status="acked")] * len(entries)

    settler = settler_of(call)
    settler.submit(Settlement(Verb.ACK, SettleEntry(receipt_handle="h")), asyncio.get_running_loop().time() + 60)
    settling = asyncio.create_task(settler.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await was_repeated.wait()
        settler.finish()
        await settling


async def test_a_stop_tries_each_settlement_once_more() -> None:
    tried = asyncio.Event()
    tries: list[Verb] = []

    async def call(verb: Verb, entries: Sequence[SettleEntry]) -> list[SettleResult]:
        tries.append(verb)
        tried.set()
        if len(tries) == 1:
            raise error_from({}, status=503, retry_after_seconds=3_600)
        return [SettleResult(status="acked")] * len(entries)

    settler = settler_of(call, lease_seconds=43_200)
    settler.submit(Settlement(Verb.ACK, SettleEntry(receipt_handle="h")), asyncio.get_running_loop().time() + 43_200)
    settling = asyncio.create_task(settler.run())
    await tried.wait()
    await asyncio.sleep(0)  # the error is recorded
    settler.finish()
    async with asyncio.timeout(WAIT_SECONDS):
        await settling
    assert len(tries) == 2


def settler_of(call: SettleCall, *, lease_seconds: float = 6.0) -> Settler:
    async def read() -> float:
        return lease_seconds

    return Settler(call, LeaseLength(read, lease_seconds), Counters(), random.Random())


def test_a_client_follows_no_gateway_for_longer_than_a_minute() -> None:
    for told, followed in {"3600": 60.0, "inf": 60.0, "nan": 0.0, "-1": 0.0, "5": 5.0}.items():
        assert retry_after_seconds(httpx.Response(503, headers={"retry-after": told})) == followed


@pytest.fixture
def url(shared_proxy: ProxyProcess) -> str:
    return shared_proxy.url
