"""A message is the same whether a proxy or a program on bare RabbitMQ reads it."""
# pyright: reportPrivateUsage=false
# The test compares the names of the marks.

from datetime import UTC, datetime
from decimal import Decimal
from math import inf, nan
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from popgate.adapters.rabbitmq import holds, properties
from popgate.domain.message import Message as ProxyMessage
from popgate.domain.names import BrokerQueue, CopyId
from popgate_client import Message
from popgate_client.amqp.delivered import is_expired, read
from popgate_client.amqp.holding import hold_names

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def as_read(written: bytes, *, redelivered: bool = False, exchange: str = "popgate:t") -> Message:
    return read(delivered(written, redelivered=redelivered, exchange=exchange), "t", "g", 3)


def delivered(written: bytes, *, redelivered: bool = False, exchange: str = "popgate:t") -> DeliveredMessage:
    header = ContentHeader()
    header.unmarshal(b"\0\0\0\0" + (4).to_bytes(8, "big") + written)
    frame = Basic.Deliver("tag", 7, redelivered, exchange, "3")
    channel: Any = None
    return DeliveredMessage(delivery=frame, header=header, body=b"body", channel=channel)


def foreign(**fields: Any) -> bytes:
    return Basic.Properties(**fields).marshal()


@pytest.mark.parametrize(
    "written",
    [
        foreign(),
        foreign(message_id="m-1", timestamp=NOON, content_type="text/plain", priority=3, message_type="order"),
        foreign(app_id="shop", reply_to="q", correlation_id="c", content_encoding="gzip", expiration="9", user_id="u"),
        foreign(headers={"text": "yes", "bytes": bytearray(b"\xff\xfe"), "number": 5, "real": 1.5, "no": None}),
        foreign(headers={"at": NOON, "money": Decimal("1.25"), "list": [1, True], "table": {"a": {}}, "bad": nan}),
    ],
)
def test_what_others_publish_reads_the_same(written: bytes) -> None:
    theirs = properties.decode(written, b"body", b"\x04shop\x033rd", unique_message_ids=False).message
    mine = read(delivered(written, exchange="shop"), "t", "g", 3)
    routed = {**mine.headers, "amqp-routing-key": "3rd"}
    assert routed == theirs.headers
    assert (mine.message_id or "") == theirs.message_id
    assert (mine.published_at or 0.0) == theirs.published_at
    assert mine.ordering_key is theirs.ordering_key is None


def test_what_popgate_publishes_reads_the_same() -> None:
    published = ProxyMessage(
        copy_id=CopyId("copy"),
        message_id="m-1",
        body=b"body",
        headers={"kind": "express", "CC": "escaped", "n": 1, "amqp-content-type": "text/plain", "deep": {"a": [1]}},
        ordering_key="customer-1",
        published_at=1_700_000_000.25,
        visible_at=None,
        expires_at=None,
    )
    mine = as_read(properties.encode(published, "1:tag"))
    assert mine.headers == published.headers
    assert mine.message_id == published.message_id
    assert mine.ordering_key == published.ordering_key
    assert mine.published_at == published.published_at
    assert (mine.topic, mine.group, mine.queue, mine.text) == ("t", "g", 3, "body")
    assert (mine.delivery_count, mine.invisible_until) == (1, inf)


def test_a_delivery_count_is_rabbitmqs_on_a_redelivery_only() -> None:
    assert as_read(foreign(headers={"x-delivery-count": 4}), redelivered=True).delivery_count == 5
    assert as_read(foreign(headers={"x-delivery-count": 4})).delivery_count == 1
    assert as_read(foreign(), redelivered=True).delivery_count == 2


def test_of_a_delayed_message_the_way_it_came_is_left_out() -> None:
    way = {"x-death": [{"queue": "level"}], "x-first-death-queue": "level", "x-popgate-visible-at": 1.5, "kept": 1}
    assert as_read(foreign(headers=way)).headers == {"kept": 1}


def test_a_message_whose_time_to_live_is_over_is_expired() -> None:
    assert is_expired(delivered(foreign(headers={"x-popgate-expires-at": 1.5})))
    assert not is_expired(delivered(foreign(headers={"x-popgate-expires-at": 4_000_000_000.0})))
    assert not is_expired(delivered(foreign()))


@pytest.mark.parametrize("queue", ["popgate:t:g:0", "ü" * 130])
def test_programs_and_proxies_hold_a_queue_by_the_same_mark(queue: str) -> None:
    assert hold_names(queue) == holds.hold_names(BrokerQueue(queue))
