"""What is repeated, for how long, and that no repeat doubles or loses anything: real proxies, killed and cut off."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import httpx
import pytest

from popgate_client import (
    BrokerUnavailable,
    Client,
    Message,
    OutgoingMessage,
    PopgateError,
    PublishResult,
    RetryLater,
    ServerUnreachable,
    SettleEntry,
    SettleResult,
    Verb,
)
from popgate_client.exchange import Attempt, Exchange, Exchanges
from popgate_client.wire import Reply, T
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

LoseAnswers: TypeAlias = Callable[[str, Sequence[int]], None]
RETRY_SECONDS = 30.0


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
        results = cut.publish(topic, *texts)
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
    """Every message that was answered is there once; one in doubt at most once; nothing else is there."""
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
                enough = len(answered) + chance.randint(20, 100)
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


@pytest.mark.xfail(
    strict=False,
    reason="the proxy answers 503 for messages that it has sent already; RabbitMQ stores them after the alarm",
)
def test_a_publish_under_an_alarm_waits_and_is_not_doubled(
    rabbit_proxy: ProxyProcess, rabbitmq: RabbitNode, topic: str
) -> None:
    """RabbitMQ announces an alarm only at the first message it reads under it, and it stores that one."""
    with Client(rabbit_proxy.url) as client, ThreadPoolExecutor() as threads:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "default")
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
        try:
            publishing = [threads.submit(client.publish, topic, str(number)) for number in range(4)]
            wait_until(lambda: not is_ready(rabbit_proxy), timeout_seconds=10, what="the alarm")
        finally:
            rabbitmq.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
        outcomes = [each.result()[0] for each in publishing]
        seen = Counter(drain(client, topic))
    stored = {str(number) for number, outcome in enumerate(outcomes) if outcome.ok}
    assert seen.keys() >= stored
    assert max(seen.values()) == 1, "a publish was doubled"
    for outcome in outcomes:
        assert outcome.ok or (outcome.error or {})["code"] == "not_confirmed"


def is_ready(proxy: ProxyProcess) -> bool:
    return proxy.client.get("/readyz").is_success


# ---------------------------------------------------------------- how long, without any I/O


class Patient:
    """Drives an exchange by hand: what it asked for, and the time that its pauses took."""

    def __init__(self, replies: Callable[[int], Reply]) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.requests: list[bytes | None] = []
        self.first_answer_seconds = 0.0
        self._replies = replies

    def exchanges(self, retry_seconds_max: float = RETRY_SECONDS) -> Exchanges:
        return Exchanges(retry_seconds_max=retry_seconds_max, clock=lambda: self.now, chance=random.Random(1))

    def drive(self, exchange: Exchange[T]) -> T:
        try:
            attempt: Attempt = next(exchange)
            while True:
                self.now += attempt.delay_seconds if self.requests else self.first_answer_seconds
                self.pauses.append(attempt.delay_seconds)
                self.requests.append(attempt.request.content)
                attempt = exchange.send(self._replies(len(self.requests)))
        except StopIteration as finished:
            result: T = finished.value
            return result


def lost(_: int) -> Reply:
    return httpx.ReadError("cut")


def refused(_: int) -> Reply:
    return httpx.ConnectError("nobody there")


def unavailable(_: int) -> Reply:
    return httpx.Response(503, json={"code": "broker_unavailable"}, headers={"retry-after": "2"})


@contextmanager
def gives_up_after(patient: Patient, seconds: float) -> Generator[None]:
    with pytest.raises(RetryLater):
        yield
    assert seconds - 8 < patient.now <= seconds
    assert all(pause <= 8 for pause in patient.pauses)


def test_patience_ends_after_its_time_and_pauses_grow() -> None:
    patient = Patient(lost)
    with gives_up_after(patient, RETRY_SECONDS):
        patient.drive(patient.exchanges().pop("t", "g", make=Message))
    assert patient.pauses[:4] == sorted(patient.pauses[:4])
    assert len(set(patient.requests)) == 1, "a repeat has the same attempt_id"
    assert len(patient.requests) < 25


def test_patience_is_counted_from_the_first_failure_not_from_the_call() -> None:
    patient = Patient(lost)
    patient.first_answer_seconds = 40.0  # a long poll that broke at its end
    with gives_up_after(patient, 40.0 + RETRY_SECONDS):
        patient.drive(patient.exchanges().pop("t", "g", make=Message, wait_seconds=30))


def test_a_pause_is_never_shorter_than_the_server_asked_for() -> None:
    patient = Patient(unavailable)
    with gives_up_after(patient, RETRY_SECONDS):
        patient.drive(patient.exchanges().publish("t", ["a"]))
    assert min(patient.pauses[1:]) >= 2


@pytest.mark.parametrize(
    ("reply", "messages", "repeated"),
    [
        (lost, ["a"], False),
        (refused, ["a"], True),
        (unavailable, ["a"], True),
        (lost, [OutgoingMessage(body="a", dedup_id="1")], True),
        (lost, [OutgoingMessage(body="a", dedup_id="1"), "b"], False),
    ],
)
def test_a_publish_is_repeated_only_where_that_cannot_double_it(
    reply: Callable[[int], Reply], messages: list[OutgoingMessage | str | bytes], repeated: bool
) -> None:
    patient = Patient(reply)
    with pytest.raises(RetryLater):
        patient.drive(patient.exchanges().publish("t", messages))
    assert (len(patient.requests) > 1) is repeated


@pytest.mark.parametrize(("reply", "repeated"), [(lost, False), (refused, True), (unavailable, True)])
def test_a_deletion_is_repeated_only_where_it_was_not_done(reply: Callable[[int], Reply], repeated: bool) -> None:
    patient = Patient(reply)
    with pytest.raises(RetryLater):
        patient.drive(patient.exchanges().delete("/v1/admin/topics/t"))
    assert (len(patient.requests) > 1) is repeated


def settled(*statuses: str) -> httpx.Response:
    return httpx.Response(200, json={"results": [{"status": status} for status in statuses]})


def ack(patient: Patient, *handles: str) -> list[str]:
    entries = [SettleEntry(receipt_handle=handle) for handle in handles]
    results: list[SettleResult] = patient.drive(patient.exchanges().settle("t", "g", Verb.ACK, entries))
    return [result.status for result in results]


def test_only_entries_that_were_not_decided_are_asked_again() -> None:
    answers: list[Reply] = [
        settled("acked", "unavailable", "expired", "unavailable"),
        httpx.ReadError("cut"),
        settled("acked", "unavailable"),
        settled("acked"),
    ]
    patient = Patient(lambda count: answers[count - 1])
    assert ack(patient, "a", "b", "c", "d") == ["acked", "acked", "expired", "acked"]
    assert patient.requests == [
        b'{"receipt_handles":["a","b","c","d"]}',
        b'{"receipt_handles":["b","d"]}',
        b'{"receipt_handles":["b","d"]}',
        b'{"receipt_handles":["d"]}',
    ]


def test_entries_that_stay_undecided_stand_in_the_results() -> None:
    patient = Patient(lambda count: settled("acked", "unavailable") if count == 1 else settled("unavailable"))
    assert ack(patient, "a", "b") == ["acked", "unavailable"]
    assert RETRY_SECONDS - 8 < patient.now <= RETRY_SECONDS


def test_a_settlement_raises_only_where_no_entry_was_answered() -> None:
    patient = Patient(lambda count: settled("acked", "unavailable") if count == 1 else lost(count))
    assert ack(patient, "a", "b") == ["acked", "unavailable"]

    patient = Patient(lambda count: settled(*["acked"] * 256) if count == 1 else lost(count))
    assert ack(patient, *map(str, range(300))) == ["acked"] * 256 + ["unavailable"] * 44

    with pytest.raises(ServerUnreachable):
        ack(Patient(lost), "a")


def test_a_refused_request_is_not_repeated() -> None:
    patient = Patient(lambda _: httpx.Response(400, json={"code": "invalid_request", "detail": "no"}))
    with pytest.raises(PopgateError):
        ack(patient, "a")
    assert len(patient.requests) == 1


def test_what_is_too_big_for_one_request_is_spread_over_several() -> None:
    patient = Patient(lambda count: httpx.Response(200, json={"results": [{"status": "published"}] * 4}))
    bodies: list[bytes] = [bytes(11 << 20)] * 8  # 117 MiB in base64; a request takes 64
    results = patient.drive(patient.exchanges().publish("t", bodies))
    assert all(result.ok for result in results)
    sizes = [len(content) for content in patient.requests if content is not None]
    assert len(sizes) == 2
    assert max(sizes) <= 64 << 20


def test_a_later_chunk_that_is_refused_does_not_hide_what_is_stored() -> None:
    def reply(count: int) -> Reply:
        if count == 1:
            return httpx.Response(200, json={"results": [{"status": "published"}] * 256})
        return httpx.Response(413, json={"code": "message_too_large", "detail": "no"})

    patient = Patient(reply)
    results: list[PublishResult] = patient.drive(patient.exchanges().publish("t", ["x"] * 600))
    codes = [result.error["code"] if result.error else result.status for result in results]
    assert codes == ["published"] * 256 + ["message_too_large"] * 256 + ["not_sent"] * 88
    assert len(patient.requests) == 2
