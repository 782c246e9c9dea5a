"""Which calls are repeated, how long, and that no repeat stores twice or loses a message: real proxies, killed and cut
off."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from popgate_client import (
    BrokerUnavailable,
    Client,
    Message,
    ServerUnreachable,
)
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

LoseAnswers: TypeAlias = Callable[[str, Sequence[int]], None]


def attempt_ids(requests: list[bytes]) -> list[bytes]:
    return [request.partition(b'"attempt_id":"')[2].partition(b'"')[0] for request in requests if b"/pop " in request]


# ---------------------------------------------------------------- answers that never arrive


def test_a_pop_whose_answer_was_lost_gets_the_same_lease(
    client: Client, topic: str, wire_url: str, lose_answers: LoseAnswers, sent_requests: list[bytes]
) -> None:
    client.publish(topic, "a", "b")
    lose_answers("/pop", [1, 2])
    with Client(wire_url) as cut:
        (message,) = cut.pop(topic, "default")
    assert message.delivery_count == 1
    assert client.stats(topic, "default")["in_flight"] == 1
    assert len(attempt_ids(sent_requests)) == 3
    assert len(set(attempt_ids(sent_requests))) == 1


@pytest.mark.parametrize("verb", ["ack", "release", "extend", "reject"])
def test_a_settlement_whose_answer_was_lost_succeeds_when_repeated(
    client: Client, topic: str, wire_url: str, lose_answers: LoseAnswers, verb: str
) -> None:
    client.publish(topic, "a")
    with Client(wire_url) as cut:
        (message,) = cut.pop(topic, "default")
        lose_answers(f"/{verb}", [1, 2])
        if verb == "extend":
            message.extend(60)
        else:
            getattr(message, verb)()
    state = client.stats(topic, "default")
    found = {name: state[name] for name in ("ready", "in_flight", "dead")}
    assert found == {
        "ready": int(verb == "release"),
        "in_flight": int(verb == "extend"),
        "dead": int(verb == "reject"),
    }


def test_a_publish_whose_answer_was_lost_is_not_repeated(
    client: Client, topic: str, wire_url: str, lose_answers: LoseAnswers, sent_requests: list[bytes]
) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    lose_answers("/messages", [1])
    with Client(wire_url) as cut, pytest.raises(ServerUnreachable) as caught:
        cut.publish(topic, "a")
    assert caught.value.sent is True
    assert len(sent_requests) == 1
    assert [message.text for message in client.pop(topic, "default", 10, wait_seconds=10)] == ["a"]
    assert client.pop(topic, "default", 10) == []


def test_what_follows_a_lost_chunk_is_not_sent_and_the_results_say_so(
    client: Client, topic: str, wire_url: str, lose_answers: LoseAnswers, sent_requests: list[bytes]
) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    texts = [str(number) for number in range(600)]

    lose_answers("/messages", [2])
    with Client(wire_url) as cut:
        results = cut.publish(topic, *texts, raise_on_failure=False)
    codes = [result.error["code"] if result.error else result.status for result in results]
    assert codes == ["published"] * 256 + ["server_unreachable"] * 256 + ["not_sent"] * 88
    assert len(sent_requests) == 2
    with pytest.raises(ServerUnreachable):
        results[256].raise_for_status()
    assert client.stats(topic, "default")["ready"] == 512


def test_no_repeats_where_they_are_turned_off(
    wire_url: str, lose_answers: LoseAnswers, sent_requests: list[bytes], topic: str
) -> None:
    lose_answers("/pop", [1])
    with Client(wire_url, retry_seconds_max=0) as cut, pytest.raises(ServerUnreachable):
        cut.pop(topic, "default")
    assert len(sent_requests) == 1


# ---------------------------------------------------------------- a proxy that is killed


def test_an_attempt_repeated_after_a_kill_gets_the_same_receipts(killable_proxy: ProxyProcess, topic: str) -> None:
    with Client(killable_proxy.url) as client:
        client.publish(topic, *(str(number) for number in range(20)))
        first = client.pop(topic, "default", 5, wait_seconds=10, attempt_id="attempt")
        killable_proxy.kill()
        killable_proxy.start()
        again = client.pop(topic, "default", 5, wait_seconds=10, attempt_id="attempt")
        assert {each.receipt_handle: each.body for each in first} == {each.receipt_handle: each.body for each in again}
        assert {message.delivery_count for message in again} == {1}

        others: list[Message] = []
        while len(others) < 20 - len(first):
            popped = client.pop(topic, "default", 256, wait_seconds=10)
            assert popped, f"{len(others)} others came"
            others += popped
        assert {message.body for message in others}.isdisjoint(message.body for message in first)
        assert {result.status for result in client.ack(topic, "default", [*first, *others])} == {"acked"}


def test_calls_wait_for_a_proxy_that_is_being_restarted(own_proxy: ProxyProcess, topic: str) -> None:
    with Client(own_proxy.url) as client:
        client.publish(topic, "a")
        (message,) = client.pop(topic, "default", wait_seconds=10)
        own_proxy.kill()
        with ThreadPoolExecutor() as threads:
            acking = threads.submit(client.ack, topic, "default", message)
            publishing = threads.submit(client.publish, topic, "b")
            popping = threads.submit(client.pop, topic, "default", wait_seconds=10)
            reading = threads.submit(client.info)
            own_proxy.start()
            assert [result.status for result in acking.result()] == ["acked"]
            assert [result.status for result in publishing.result()] == ["published"]
            assert [message.text for message in popping.result()] == ["b"]
            assert reading.result()["service"] == "popgate"


def test_a_long_poll_outlives_a_kill(own_proxy: ProxyProcess, topic: str) -> None:
    with Client(own_proxy.url) as client, Client(own_proxy.url) as other, ThreadPoolExecutor() as threads:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "default")
        popping = threads.submit(client.pop, topic, "default", wait_seconds=30)
        wait_until(lambda: parked_pops(own_proxy) == 1, timeout_seconds=10, what="the pop to park")
        own_proxy.kill()
        own_proxy.start()
        other.publish(topic, "hello")
        assert [message.text for message in popping.result(timeout=20)] == ["hello"]


def parked_pops(proxy: ProxyProcess) -> int:
    text = proxy.client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("popgate_parked_pops")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def test_publishing_through_kills_doubles_nothing_and_loses_nothing(
    killable_proxy: ProxyProcess, topic: str, seed: int, full_run: bool
) -> None:
    """Check that every confirmed message is there once, one in doubt at most once, and no other message."""
    chance = random.Random(seed)
    answered: set[str] = set()
    doubtful: set[str] = set()
    stop = threading.Event()

    def publish(writer: int) -> None:
        with Client(killable_proxy.url) as client:
            number = 0
            while not stop.is_set():
                text = f"{writer}-{number}"
                number += 1
                try:
                    client.publish(topic, text)[0].raise_for_status()
                    answered.add(text)
                except ServerUnreachable as error:
                    if not error.sent:  # that is repeated until the proxy is back
                        raise
                    doubtful.add(text)

    with Client(killable_proxy.url) as client, ThreadPoolExecutor() as threads:
        client.put_topic(topic, queues=2)
        client.put_group(topic, "default")
        publishing = [threads.submit(publish, writer) for writer in range(4)]
        try:
            for _ in range(20 if full_run else 2):
                enough = len(answered) + chance.randint(10, 40)
                wait_until(lambda: len(answered) >= enough, timeout_seconds=30, what="publishes")  # noqa: B023  # at once
                killable_proxy.kill()
                killable_proxy.start()
        finally:
            stop.set()
        for each in publishing:
            each.result(timeout=60)
        seen = Counter(drain(client, topic))
    assert seen.keys() >= answered, "an answered publish was lost"
    assert seen.keys() <= answered | doubtful
    assert max(seen.values()) == 1, "a publish was doubled"


def drain(client: Client, topic: str) -> Iterator[str]:
    while popped := client.pop(topic, "default", 256, wait_seconds=2):
        client.ack(topic, "default", popped)
        yield from (message.text for message in popped)


# ---------------------------------------------------------------- a broker that is away


def test_a_publish_waits_until_rabbitmq_is_back(
    remote_proxy: ProxyProcess, set_broker_line: Callable[[bool], None], topic: str
) -> None:
    with Client(remote_proxy.url) as client, ThreadPoolExecutor() as threads:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "default")
        set_broker_line(False)
        with Client(remote_proxy.url, retry_seconds_max=0) as impatient:
            wait_until(lambda: not is_ready(remote_proxy), timeout_seconds=10, what="the proxy to notice")
            with pytest.raises(BrokerUnavailable) as caught:
                impatient.publish(topic, "never")
        assert caught.value.status == 503
        assert caught.value.retry_after_seconds > 0
        publishing = threads.submit(client.publish, topic, "a")
        set_broker_line(True)
        assert [result.status for result in publishing.result()] == ["published"]
        assert list(drain(client, topic)) == ["a"]


def test_a_publish_that_an_alarm_caught_under_way_is_not_repeated_and_so_not_doubled(
    rabbit_proxy: ProxyProcess, rabbitmq: RabbitNode, topic: str
) -> None:
    """RabbitMQ announces an alarm only at the first message it reads under it, and it stores that one."""
    with Client(rabbit_proxy.url) as client, ThreadPoolExecutor() as threads:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "default")
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
        try:
            publishing = [threads.submit(publish_once, client, topic, str(number)) for number in range(4)]
            # An alarm stops publishes only, so the proxy stays ready: the alarm shows in what it answers to one.
            wait_until(
                lambda: any(each.done() and each.result() is not None for each in publishing),
                timeout_seconds=10,
                what="the alarm",
            )
        finally:
            rabbitmq.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
        outcomes = [each.result() for each in publishing]
        seen = Counter(drain(client, topic))
    assert seen.keys() >= {str(number) for number, outcome in enumerate(outcomes) if outcome is None}
    assert max(seen.values(), default=1) == 1, "a publish was doubled"
    assert all(outcome is None or outcome.outcome_unknown for outcome in outcomes)


def publish_once(client: Client, topic: str, body: str) -> BrokerUnavailable | None:
    """Return None if the message was stored, else the error."""
    try:
        (result,) = client.publish(topic, body)
    except BrokerUnavailable as error:
        return error
    assert result.ok
    return None


def is_ready(proxy: ProxyProcess) -> bool:
    return proxy.client.get("/readyz").is_success
