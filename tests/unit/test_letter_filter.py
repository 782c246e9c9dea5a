"""Which dead letters meet the conditions of a search."""

from typing import Any

import pytest

from popgate.domain.attempts import Attempt
from popgate.domain.dead_letter import DeadLetterDetails, dead_letter_headers
from popgate.domain.letter_filter import BODY_BYTES_SEARCHED, LetterFilter
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName

DEAD_AT = 1_795_000_060.5
ATTEMPT = Attempt(2, 1_795_000_000.0, DEAD_AT, "rejected", "worker-7", "TimeoutError", "no answer from the bank")
NOTE = DeadLetterDetails("rejected", "card declined", 0, 2, 1_795_000_000.0, DEAD_AT, (ATTEMPT,))
COPY = CopyId("1" * 32)
BODY = b"Customer 4711" + bytes(BODY_BYTES_SEARCHED) + b"the end"


def letter() -> Message:
    subscription = Subscription(TopicName("orders"), GroupName("billing"))
    headers = dead_letter_headers({"Region": "eu-West", "n": 7}, NOTE, subscription, CopyId("0" * 32))
    return Message(COPY, "order-9", BODY, headers, "customer-4", 1.5)


@pytest.mark.parametrize(
    ("conditions", "is_met"),
    [
        ({}, True),
        ({"cause": "rejected"}, True),
        ({"cause": "reject"}, False),
        ({"reason": "CARD"}, True),
        ({"reason": "timeouterror: no answer"}, True),
        ({"reason": "worker-7"}, False),
        ({"client": "worker-7"}, True),
        ({"client": "worker"}, False),
        ({"ordering_key": "customer-4"}, True),
        ({"ordering_key": "customer"}, False),
        ({"message_id": "order-9"}, True),
        ({"message_id": "order"}, False),
        ({"header": "region: EU"}, True),
        ({"header": "n: 7"}, True),
        ({"header": "x-popgate-dead"}, False),
        *(({"text": text}, True) for text in ("card", "BANK", "worker-", "ORDER-", "omer-4", "eu-w", "4711", "1111")),
        ({"text": "the end"}, False),
        ({"dead_after": DEAD_AT}, True),
        ({"dead_after": DEAD_AT + 0.1}, False),
        ({"dead_before": DEAD_AT}, False),
        ({"dead_before": DEAD_AT + 0.1}, True),
        ({"cause": "rejected", "reason": "declined", "header": "eu-west", "text": "order"}, True),
        ({"cause": "rejected", "reason": "declined", "header": "eu-west", "text": "other"}, False),
    ],
)
def test_a_letter_meets_conditions_only_together(conditions: dict[str, Any], is_met: bool) -> None:
    assert LetterFilter(**conditions).takes(letter(), COPY, DEAD_AT) is is_met


def test_a_letter_of_another_program_meets_only_conditions_on_what_it_has() -> None:
    foreign = Message(COPY, "", b"\xff\xfe binary", {}, None, 0.0)
    assert LetterFilter(text="binary").takes(foreign, COPY, 0.0)
    assert LetterFilter(dead_before=1.0).takes(foreign, COPY, 0.0)
    for name in ("cause", "reason", "client", "ordering_key", "message_id", "header"):
        conditions: dict[str, Any] = {name: "x"}
        assert not LetterFilter(**conditions).takes(foreign, COPY, 0.0)
