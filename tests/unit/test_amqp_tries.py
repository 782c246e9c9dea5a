"""What a program on bare RabbitMQ writes into a dead letter about its tries, as a proxy reads it."""

import json

from popgate.domain.dead_letter import dead_letter_details
from popgate_client.amqp.tries import ATTEMPTS, ERROR_TEXT, TRIES_MAX, Tries
from popgate_client.handling import RetryDelays, settlement_for
from popgate_client.message import Message


def tried(tries: Tries, number: int, error: Exception) -> None:
    message = Message(
        topic="t",
        group="g",
        receipt_handle="h",
        body=b"",
        queue=0,
        delivery_count=number,
        first_delivered_at=0.0,
        invisible_until=0.0,
    )
    settlement = settlement_for(message, error, RetryDelays())
    tries.note(message, settlement.verb, settlement.entry, began_at=number, ended_at=number + 0.5)


def test_the_latest_tries_are_kept_and_a_proxy_reads_them() -> None:
    tries = Tries("w-1", error_texts=True)
    for number in range(1, 20):
        tried(tries, number, ValueError(f"no such order {number}"))
    found = dead_letter_details(tries.headers()).attempts
    assert [one.attempt for one in found] == list(range(20 - TRIES_MAX, 20))
    last = found[-1]
    assert (last.client, last.error_type, last.error_text) == ("w-1", "ValueError", "no such order 19")
    assert (last.leased_at, last.ended_at, last.outcome, last.reason) == (19.0, 19.5, "released", "ValueError")


def test_without_error_texts_the_type_stays() -> None:
    tries = Tries("w-1", error_texts=False)
    tried(tries, 1, ValueError("secret"))
    headers = tries.headers()
    assert ERROR_TEXT not in headers
    assert "secret" not in json.dumps(headers)
    assert json.loads(headers[ATTEMPTS])[0]["error_type"] == "ValueError"


def test_the_headers_of_the_longest_errors_stay_small() -> None:
    tries = Tries("w" * 71, error_texts=True)
    for number in range(1, 20):
        tried(tries, number, type("E" * 999, (Exception,), {})("\U0001f600" * 9_999))
    assert len(json.dumps(tries.headers(), ensure_ascii=False).encode()) < 32_768
