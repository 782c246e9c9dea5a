"""Batches on their way to the server: which are resent, which are given up, and in which order answers count."""

import threading
from collections.abc import Sequence

import pytest

from popgate.cli.sending import WIDTH_MAX, BatchResult, Numbered, Pipeline, send
from popgate_client import (
    BrokerUnavailable,
    OutgoingMessage,
    PopgateError,
    PublishResult,
    RequestInvalid,
    ServerUnreachable,
    TopicNotFound,
)


def batch(*bodies: str, first: int = 1) -> list[Numbered]:
    return [Numbered(number, OutgoingMessage(body=body)) for number, body in enumerate(bodies, first)]


class Server:
    """Refuses a whole request for its first message with the body "bad", as the HTTP interface does."""

    def __init__(self, error: PopgateError | None = None) -> None:
        self.stored: list[str] = []
        self.requests = 0
        self._error = error

    def publish(self, topic: str, *messages: OutgoingMessage, raise_on_failure: bool) -> list[PublishResult]:
        assert not raise_on_failure
        self.requests += 1
        if self._error is not None:
            raise self._error
        bodies = [str(message.body) for message in messages]
        if "bad" in bodies:
            at = bodies.index("bad")
            error = RequestInvalid("invalid_request", f"messages[{at}].headers.x is bad", 400)
            error.field = f"messages[{at}].headers.x"
            raise error
        self.stored += bodies
        return [PublishResult(status="published", message_id=f"id-{body}") for body in bodies]


def test_a_message_that_makes_the_server_refuse_the_batch_is_left_out_and_the_rest_is_stored() -> None:
    server = Server()
    outcome = send(server.publish, "orders", batch("a", "bad", "b", "bad", first=10))
    assert server.stored == ["a", "b"]
    assert outcome.error is None
    assert outcome.published == 2
    assert [(one.number, one.code, one.detail) for one in outcome.refused] == [
        (11, "invalid_request", "headers.x is bad"),
        (13, "invalid_request", "headers.x is bad"),
    ]


def test_a_batch_of_bad_messages_only_ends() -> None:
    server = Server()
    outcome = send(server.publish, "orders", batch("bad", "bad"))
    assert (server.requests, outcome.published, len(outcome.refused), outcome.error) == (2, 0, 2, None)


def test_a_message_that_failed_alone_is_reported_with_the_servers_reason() -> None:
    def publish(topic: str, *messages: OutgoingMessage, raise_on_failure: bool) -> list[PublishResult]:
        assert not raise_on_failure
        error = {"code": "no_subscribers", "detail": "nobody"}
        return [PublishResult(status="published"), PublishResult(status="failed", message_id="m", error=error)]

    outcome = send(publish, "orders", batch("a", "b"))
    assert outcome.published == 1
    assert outcome.refused == [(2, "m", "no_subscribers", "nobody")]
    assert outcome.error is None


@pytest.mark.parametrize("error", [TopicNotFound("topic_not_found", "no topic"), BrokerUnavailable("b", "away")])
def test_what_all_batches_would_meet_ends_the_work(error: PopgateError) -> None:
    server = Server(error)
    outcome = send(server.publish, "orders", batch("a", "b"))
    assert (server.requests, outcome.error, outcome.published) == (1, error, 0)
    assert [one.detail for one in outcome.refused] == [error.detail] * 2


@pytest.mark.parametrize(("sent", "doubt"), [(True, True), (False, False)])
def test_it_says_so_where_a_message_may_be_stored_in_spite_of_the_error(sent: bool, doubt: bool) -> None:
    error = ServerUnreachable("server_unreachable", "no answer")
    error.sent = error.outcome_unknown = sent
    outcome = send(Server(error).publish, "orders", batch("a"))
    assert ("may or may not be published" in outcome.refused[0].detail) is doubt


# ---------------------------------------------------------------- several at once


class Gate:
    """Sends a batch when the test allows it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._may_end: dict[int, threading.Event] = {}
        self._changed = threading.Condition()

    def send(self, numbered: Sequence[Numbered]) -> BatchResult:
        number = numbered[0].number
        with self._changed:
            self.begun.append(number)
            event = self._may_end.setdefault(number, threading.Event())
            self._changed.notify_all()
        assert event.wait(10)
        return BatchResult(published=number)

    def end(self, number: int) -> None:
        with self._changed:
            self._may_end.setdefault(number, threading.Event()).set()

    def wait_begun(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 10)


def published(outcomes: Sequence[BatchResult]) -> list[int]:
    return [outcome.published for outcome in outcomes]


def test_outcomes_come_in_the_order_of_the_batches() -> None:
    gate = Gate()
    pipeline = Pipeline(gate.send)
    for number in (1, 2, 3):
        assert list(pipeline.make_room()) == []
        pipeline.submit(batch("x", first=number))
    gate.wait_begun(3)
    for number in (3, 2, 1):
        gate.end(number)
    assert published(list(pipeline.drain())) == [1, 2, 3]
    assert pipeline.unanswered == 0


def test_no_more_than_so_many_are_on_their_way() -> None:
    gate = Gate()
    pipeline = Pipeline(gate.send)
    for number in range(1, WIDTH_MAX + 1):
        pipeline.submit(batch("x", first=number))
    gate.wait_begun(WIDTH_MAX)
    assert pipeline.unanswered == WIDTH_MAX
    gate.end(1)
    assert published(list(pipeline.make_room())) == [1]
    pipeline.submit(batch("x", first=WIDTH_MAX + 1))
    for number in range(2, WIDTH_MAX + 2):
        gate.end(number)
    assert published(list(pipeline.drain())) == list(range(2, WIDTH_MAX + 2))


def test_a_batch_that_goes_alone_waits_for_all_before_it() -> None:
    gate = Gate()
    pipeline = Pipeline(gate.send)
    pipeline.submit(batch("x", first=1))
    pipeline.submit(batch("x", first=2))
    gate.end(2)
    gate.end(1)
    assert published(list(pipeline.make_room(alone=True))) == [1, 2]


def test_patience_ends_and_what_is_unanswered_is_counted() -> None:
    gate = Gate()
    pipeline = Pipeline(gate.send)
    pipeline.submit(batch("x", "y", first=1))
    gate.wait_begun(1)
    assert list(pipeline.drain(0.01)) == []
    assert pipeline.unanswered == 2
    gate.end(1)


def test_a_bug_in_sending_is_not_swallowed() -> None:
    def broken(numbered: Sequence[Numbered]) -> BatchResult:
        raise ZeroDivisionError

    pipeline = Pipeline(broken)
    pipeline.submit(batch("x"))
    with pytest.raises(ZeroDivisionError):
        next(pipeline.drain())
