"""Which calls are repeated, and how long: runs the client's exchanges step by step, without I/O."""

import json
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager

import httpx
import pytest

from popgate_client import (
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

RETRY_SECONDS = 30.0
REQUESTS_MAX = 1_000
"""Number of requests after which a call would never end."""


class Patient:
    """Runs an exchange step by step; records its requests and the time of its pauses."""

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
                assert len(self.requests) < REQUESTS_MAX
                attempt = exchange.send(self._replies(len(self.requests)))
        except StopIteration as finished:
            result: T = finished.value
            return result


def lost(_: int) -> Reply:
    return httpx.ReadError("cut")


def refused(_: int) -> Reply:
    return httpx.ConnectError("nobody there")


def problem(code: str, content_type: str = "application/problem+json", **fields: object) -> httpx.Response:
    """popgate's own 503."""
    document = {"type": f"urn:popgate:problem:{code}", "status": 503, "code": code, **fields}
    headers = {"retry-after": "2", "content-type": content_type}
    return httpx.Response(503, content=json.dumps(document).encode(), headers=headers)


def unavailable(_: int) -> Reply:
    return problem("broker_unavailable")


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
    patient.first_answer_seconds = 40.0  # a long poll that failed at its end
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


def published(*codes: str) -> httpx.Response:
    """Results: a status, or the code of a failure."""
    return httpx.Response(
        200,
        json={
            "results": [
                {"status": code, "message_id": f"m{place}"}
                if code in ("published", "duplicate")
                else {"status": "failed", "message_id": f"m{place}", "error": {"code": code, "detail": "says the test"}}
                for place, code in enumerate(codes)
            ]
        },
    )


def with_id(body: str) -> OutgoingMessage:
    return OutgoingMessage(body=body, dedup_id=body)


def bodies_of(request: bytes | None) -> list[str]:
    return [message["body"] for message in json.loads(request or b"")["messages"]]


@pytest.mark.parametrize("code", ["not_confirmed", "state_unavailable"])
def test_messages_that_are_undecided_are_published_again_alone_where_they_have_a_dedup_id(code: str) -> None:
    replies = [
        published(code, code, "published", code, "refused"),
        published(code, "duplicate"),
        published("published"),
    ]
    patient = Patient(lambda count: replies[count - 1])
    messages: list[OutgoingMessage | str | bytes] = [with_id("a"), "b", with_id("c"), with_id("d"), with_id("e")]
    results = patient.drive(patient.exchanges().publish("t", messages))
    assert [result.status for result in results] == ["published", "failed", "published", "duplicate", "failed"]
    assert [result.ok for result in results] == [True, False, True, True, False]
    assert [bodies_of(request) for request in patient.requests] == [["a", "b", "c", "d", "e"], ["a", "d"], ["a"]]


def test_messages_that_stay_undecided_are_told_so_when_patience_ends() -> None:
    patient = Patient(lambda _: published("not_confirmed"))
    (result,) = patient.drive(patient.exchanges().publish("t", [with_id("a")]))
    assert result.error is not None
    assert result.error["code"] == "not_confirmed"
    assert sum(patient.pauses) <= RETRY_SECONDS


def invalid(_: int) -> Reply:
    return httpx.Response(400, json={"code": "invalid_request"})


@pytest.mark.parametrize("reply", [lost, invalid])
def test_a_repeat_that_fails_leaves_what_was_answered_before(reply: Callable[[int], Reply]) -> None:
    patient = Patient(lambda count: published("published", "not_confirmed") if count == 1 else reply(count))
    results = patient.drive(patient.exchanges().publish("t", ["a", with_id("b")]))
    assert [result.status for result in results] == ["published", "failed"]


@pytest.mark.parametrize(("reply", "repeated"), [(lost, False), (refused, True), (unavailable, True)])
def test_a_deletion_is_repeated_only_where_it_was_not_done(reply: Callable[[int], Reply], repeated: bool) -> None:
    patient = Patient(reply)
    with pytest.raises(RetryLater):
        patient.drive(patient.exchanges().delete("/v1/admin/topics/t"))
    assert (len(patient.requests) > 1) is repeated


IN_DOUBT: list[httpx.Response] = [
    httpx.Response(502),
    httpx.Response(504),
    # Envoy's, when the connection broke after it had sent the request on.
    httpx.Response(503, text="upstream connect error or disconnect/reset before headers"),
    httpx.Response(503, json={"code": "broker_unavailable"}),
    problem("broker_unavailable", "application/json"),
    problem("broker_unavailable", type="about:blank"),
    problem("broker_unavailable", type="urn:popgate:problem:state_unavailable"),
    problem("of_a_later_version"),
    problem("broker_unavailable", outcome_unknown=True),
    problem("state_unavailable", outcome_unknown=True),
]


@pytest.mark.parametrize("answer", IN_DOUBT)
def test_what_does_not_prove_that_nothing_was_done_is_not_repeated(answer: httpx.Response) -> None:
    calls: list[Callable[[Patient], object]] = [
        lambda patient: patient.drive(patient.exchanges().publish("t", ["a"])),
        lambda patient: patient.drive(patient.exchanges().delete("/v1/admin/topics/t")),
    ]
    for call in calls:
        patient = Patient(lambda _: answer)
        with pytest.raises(RetryLater) as caught:
            call(patient)
        assert len(patient.requests) == 1
        assert caught.value.outcome_unknown is True
        assert caught.value.retry_after_seconds == float(answer.headers.get("retry-after", 0))


@pytest.mark.parametrize("answer", IN_DOUBT)
def test_what_can_be_repeated_unharmed_is_repeated_after_any_gateways_answer(answer: httpx.Response) -> None:
    patient = Patient(lambda count: answer if count < 3 else settled("acked"))
    assert ack(patient, "a") == ["acked"]
    assert min(patient.pauses[1:]) >= float(answer.headers.get("retry-after", 0))


@pytest.mark.parametrize("code", ["broker_unavailable", "state_unavailable", "unavailable", "not_ready"])
def test_a_refusal_of_popgates_own_is_repeated(code: str) -> None:
    published = httpx.Response(200, json={"results": [{"status": "published"}]})
    patient = Patient(lambda count: problem(code) if count < 3 else published)
    (result,) = patient.drive(patient.exchanges().publish("t", ["a"]))
    assert result.ok
    assert min(patient.pauses[1:]) >= 2


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (httpx.Response(503), "server_unreachable"),
        (problem("broker_unavailable", outcome_unknown=True), "not_confirmed"),
    ],
)
def test_the_results_of_a_later_chunk_do_not_hide_the_doubt(answer: httpx.Response, code: str) -> None:
    stored = httpx.Response(200, json={"results": [{"status": "published"}] * 256})
    patient = Patient(lambda count: stored if count == 1 else answer)
    results = patient.drive(patient.exchanges().publish("t", ["x"] * 300))
    assert results[256].error is not None
    assert results[256].error["code"] == code
    assert len(patient.requests) == 2


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
