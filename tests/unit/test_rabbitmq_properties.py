"""AMQP properties <-> messages, compared with pamqp's codec."""

import json
import random
import time
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from struct import unpack
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, encode
from pamqp.common import FieldValue
from pamqp.header import ContentHeader

from popgate.adapters.rabbitmq import properties
from popgate.adapters.rabbitmq.field_values import field, short_string
from popgate.domain.identity import IdentityKeys
from popgate.domain.message import HeaderValue, Message
from popgate.domain.names import BrokerQueue, CopyId

COPY_ID = f"{7:032x}"
QUEUE = BrokerQueue("popgate:orders:billing:0")
KEYS = IdentityKeys([b"the secret of this test"])
TAG = KEYS.signer(QUEUE)
NAMES = st.text(st.characters(codec="utf-8"), max_size=30).filter(lambda name: len(name.encode()) <= 100)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
SHORT_TEXTS = TEXTS.filter(lambda text: len(text.encode()) <= 255)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1)).map(lambda moment: moment.replace(microsecond=0))  # noqa: DTZ001 - as publishers give them

SIMPLE_VALUES = st.one_of(TEXTS, INTEGERS, st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())
USER_HEADERS = st.dictionaries(NAMES.filter(lambda name: not name.startswith(("amqp-", "x-popgate-"))), SIMPLE_VALUES)
FIELDS = st.recursive(
    st.one_of(
        TEXTS,
        INTEGERS,
        st.floats(width=32),
        st.booleans(),
        st.none(),
        st.binary(max_size=20).map(bytearray),
        st.decimals(-21_000_000, 21_000_000, places=2),
        MOMENTS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)


def decoded(raw: bytes, *, routing: bytes | None = None, unique: bool = False) -> properties.Decoded:
    return properties.decode(raw, b"body", routing, check_tag=KEYS.checker(QUEUE), unique_message_ids=unique)


def encoded(message: Message) -> bytes:
    return properties.encode(message, TAG(message.copy_id))


def published_by_others(**fields: object) -> bytes:
    """Return the properties as pamqp, and so aio-pika, writes them."""
    made = commands.Basic.Properties(**fields)  # type: ignore[arg-type]
    return ContentHeader(body_size=4, properties=made).marshal()[12:]


def as_json(value: object) -> HeaderValue:
    """Return the converted form of a foreign header."""
    match value:
        case bytearray():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return b64encode(value).decode()
        case Decimal():
            return str(value)
        case datetime():
            return value.replace(tzinfo=UTC).isoformat()
        case float() if value != value or value in {float("inf"), float("-inf")}:
            return None
        case list():
            return [as_json(item) for item in cast("list[object]", value)]
        case dict():
            return {name: as_json(item) for name, item in cast("dict[str, object]", value).items()}
        case _:
            return value


@given(
    st.builds(
        Message,
        copy_id=st.integers(0, 2**128 - 1).map(lambda number: CopyId(f"{number:032x}")),
        message_id=SHORT_TEXTS,
        body=st.just(b"body"),
        headers=USER_HEADERS,
        ordering_key=st.none() | TEXTS,
        published_at=st.floats(0, 2**33),
        visible_at=st.none() | st.floats(0, 2**33),
        expires_at=st.none() | st.floats(0, 2**33),
    )
)
def test_a_message_comes_back_as_it_was_published(message: Message) -> None:
    result = decoded(encoded(message))
    assert result == (message, True, None, "")


@given(USER_HEADERS)
def test_other_clients_can_read_what_popgate_publishes(headers: dict[str, HeaderValue]) -> None:
    message = Message(
        copy_id=CopyId(COPY_ID), message_id="m1", body=b"", headers=headers, ordering_key="k", published_at=1.5
    )
    raw = encoded(message)
    header = ContentHeader()
    header.unmarshal(b"\x00\x3c\x00\x00" + bytes(8) + raw)
    assert header.properties.message_id == "m1"
    assert header.properties.delivery_mode == 2
    own: dict[str, HeaderValue] = {"x-popgate-copy-id": COPY_ID, "x-popgate-identity": TAG(COPY_ID)}
    own |= {"x-popgate-ordering-key": "k", "x-popgate-published-at": 1.5}
    meaningful = {"CC", "BCC", "x-delivery-count", "x-acquired-count", "x-death"}
    meaningful |= {f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")}
    escaped = {("x-popgate-header-" + name if name in meaningful else name): headers[name] for name in headers}
    assert header.properties.headers == escaped | own


@given(st.dictionaries(NAMES.filter(lambda name: not name.startswith(("amqp-", "x-"))), FIELDS, max_size=6))
def test_every_header_of_others_becomes_json(headers: dict[str, FieldValue]) -> None:
    result = decoded(published_by_others(headers=headers))
    assert result.problem == ""
    assert result.message.headers == {name: as_json(value) for name, value in headers.items()}
    json.dumps(result.message.headers, allow_nan=False)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": SHORT_TEXTS,
            "content_encoding": SHORT_TEXTS,
            "delivery_mode": st.sampled_from([1, 2]),
            "priority": st.integers(0, 255),
            "correlation_id": SHORT_TEXTS,
            "reply_to": SHORT_TEXTS,
            "expiration": SHORT_TEXTS,
            "message_id": SHORT_TEXTS,
            "timestamp": MOMENTS,
            "message_type": SHORT_TEXTS,
            "user_id": SHORT_TEXTS,
            "app_id": SHORT_TEXTS,
            "headers": st.just({"h": 1}),
        },
    )
)
def test_every_property_of_others_is_kept(fields: dict[str, object]) -> None:
    result = decoded(published_by_others(**fields))
    assert result.problem == ""
    expected = {
        "amqp-" + name.replace("message_type", "type").replace("_", "-"): value
        for name, value in fields.items()
        # pamqp omits empty values and 0
        if name not in {"delivery_mode", "message_id", "timestamp", "headers"} and (value or name == "priority")
    }
    seen = dict(result.message.headers)
    assert seen.pop("h", None) == (1 if "headers" in fields else None)
    assert {name: value for name, value in seen.items() if value != ""} == expected | (
        {} if "amqp-priority" in seen else {name: value for name, value in expected.items() if name == "amqp-priority"}
    )
    assert result.message.message_id == fields.get("message_id", "")
    moment = fields.get("timestamp")
    assert result.message.published_at == (
        moment.replace(tzinfo=UTC).timestamp() if isinstance(moment, datetime) else 0
    )


def test_what_a_header_can_not_hold_becomes_null_or_text() -> None:
    table = b"".join(
        [
            b"\x03nan" + b"d" + bytes.fromhex("7ff8000000000000"),
            b"\x03inf" + b"d" + bytes.fromhex("7ff0000000000000"),
            b"\x03raw" + b"S\x00\x00\x00\x02\xff\xfe",
            b"\x04late" + b"T" + bytes.fromhex("ffffffffffffffff"),
            b"\x06millis" + b"T" + (1_700_000_000_123).to_bytes(8, "big"),
            b"\x04void" + b"\x00",
            b"\x04byte" + b"B\xff",
        ]
    )
    raw = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    assert decoded(raw).message.headers == {
        "nan": None,
        "inf": None,
        "raw": "//4=",
        "late": None,
        "millis": (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=1_700_000_000_123)).isoformat(),
        "void": None,
        "byte": 255,
    }


@given(st.binary(max_size=200))
def test_no_bytes_at_all_break_the_decoder(raw: bytes) -> None:
    result = decoded(raw, routing=raw)
    assert result.message.body == b"body"
    json.dumps(result.message.headers, allow_nan=False)


@given(st.integers(0, 2**32))
def test_damaged_properties_still_deliver_the_message(choice: int) -> None:
    chance = random.Random(choice)
    raw = bytearray(
        published_by_others(message_id="m", headers={"a": [1, {"b": "c"}], "d": Decimal("1.5")}, app_id="x")
    )
    for _ in range(chance.randint(1, 3)):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    result = decoded(bytes(raw[: chance.randint(0, len(raw))]))
    assert result.message.body == b"body"
    if result.problem:
        assert list(result.message.headers) == [properties.UNREADABLE_HEADER]
        assert not result.identified


@pytest.mark.parametrize("kind", ["F", "A"])
@pytest.mark.parametrize("levels", [33, 489, 15_000])
def test_what_is_nested_deeper_than_32_becomes_text_and_can_be_published_again(levels: int, kind: str) -> None:
    name = b"\x01a" if kind == "F" else b""
    value = b"V"
    for _ in range(levels):
        field = name + value
        value = kind.encode() + len(field).to_bytes(4, "big") + field
    table = b"\x01a" + value
    result = decoded(b"\x20\x00" + len(table).to_bytes(4, "big") + table)
    assert result.problem == ""
    innermost: object = result.message.headers
    for _ in range(33):
        innermost = cast("dict[str, object]", innermost)["a"] if isinstance(innermost, dict) else innermost[0]  # type: ignore[index]
    assert isinstance(innermost, str)
    assert b64decode(innermost)[-1:] == b"V"
    letter = result.message._replace(copy_id=CopyId(COPY_ID))
    assert decoded(encoded(letter)).message == letter


def test_a_broken_table_says_what_is_wrong() -> None:
    assert "unknown header type 'q'" in decoded(b"\x20\x00\x00\x00\x00\x03\x01aq").problem
    assert "cut off" in decoded(b"\x20\x00\x00\x00\x00\xff\x01a").problem
    assert "longer than its table" in decoded(b"\x20\x00\x00\x00\x00\x07\x01aS\x00\x00\x00\x09abcdefghi").problem


@pytest.mark.parametrize(
    ("message_id", "copy_id"),
    [("order-1", "order-1"), ("~1", "%7E1"), ("", ""), (COPY_ID, "%" + COPY_ID), ("ü" * 127, "ü" * 127)],
)
def test_a_unique_message_id_is_the_copy_id(message_id: str, copy_id: str) -> None:
    result = decoded(published_by_others(message_id=message_id), unique=True)
    assert (result.message.copy_id, result.identified) == (copy_id, bool(copy_id))
    assert decoded(published_by_others(message_id=message_id)).message.copy_id == ""


def test_popgates_own_copy_id_comes_before_a_message_id() -> None:
    message = Message(
        copy_id=CopyId(COPY_ID), message_id="m", body=b"body", headers={}, ordering_key=None, published_at=0.0
    )
    assert decoded(encoded(message), unique=True).message.copy_id == COPY_ID


def test_exchange_and_routing_key_become_headers_except_for_the_default_exchange() -> None:
    raw = published_by_others()
    assert decoded(raw, routing=b"\x02ex\x03key").message.headers == {"amqp-exchange": "ex", "amqp-routing-key": "key"}
    assert decoded(raw, routing=b"\x00\x05queue").message.headers == {}
    assert decoded(raw).message.headers == {}


def test_settable_properties_become_properties_again_and_others_stay_headers() -> None:
    headers = {
        "amqp-content-type": "text/plain",
        "amqp-priority": 7,
        "amqp-user-id": "guest",
        "amqp-expiration": "5",
        "amqp-app-id": 5,
        "amqp-type": "t" * 300,
        "amqp-other": "x",
    }
    message = Message(
        copy_id=CopyId(COPY_ID), message_id="", body=b"", headers=headers, ordering_key=None, published_at=0.0
    )
    raw = encoded(message)
    header = ContentHeader()
    header.unmarshal(b"\x00\x3c\x00\x00" + bytes(8) + raw)
    seen = header.properties
    assert (seen.content_type, seen.priority, seen.user_id, seen.expiration) == ("text/plain", 7, None, None)
    kept = {"amqp-user-id", "amqp-expiration", "amqp-app-id", "amqp-type", "amqp-other"}
    assert kept < set(seen.headers or {})
    assert decoded(raw).message.headers == headers


@pytest.mark.parametrize(
    "headers", [{"n" * 256: 1}, {"big": 2**63}, {"small": -(2**63) - 1}, {"object": object()}, {"list": [2**64]}]
)
def test_what_amqp_can_not_carry_is_an_error_that_names_it(headers: dict[str, HeaderValue]) -> None:
    message = Message(
        copy_id=CopyId(COPY_ID), message_id="", body=b"", headers=headers, ordering_key=None, published_at=0.0
    )
    with pytest.raises(ValueError, match=next(iter(headers))[:10]):
        encoded(message)


def test_the_delivery_count_is_read_and_not_shown() -> None:
    result = decoded(published_by_others(headers={"x-delivery-count": 3, "other": 1}))
    assert result.delivery_count == 3
    assert result.message.headers == {"other": 1}


@pytest.mark.parametrize("counts", [(3, 2**63 - 1), (3, 5), (2**63 - 1,)])
def test_a_publisher_that_repeats_the_delivery_count_does_not_change_it(counts: tuple[int, ...]) -> None:
    """RabbitMQ 3.x writes only the first header of this name. A count near 2**63 made each grant fail."""
    table = b"".join(short_string("x-delivery-count") + field("x-delivery-count", count) for count in counts)
    assert decoded(b"\x20\0" + len(table).to_bytes(4, "big") + table).delivery_count == min(counts[0], 1_000_000)


def test_pamqp_is_encoded_with_the_types_that_this_file_expects() -> None:
    assert encode.encode_table_value(0.5) == b"f" + bytes.fromhex("3f000000")
    assert unpack(">i", encode.encode_table_value(-70_000)[1:]) == (-70_000,)


def test_times_that_another_client_has_made_whole_are_times() -> None:
    """pika reads a double as an integer, and publishes the integer."""
    headers: dict[str, FieldValue] = {"x-popgate-published-at": 1_795_000_000, "x-popgate-expires-at": 1_795_000_060}
    message = decoded(published_by_others(headers=headers)).message
    assert (message.published_at, message.expires_at) == (1_795_000_000, 1_795_000_060)


@pytest.mark.parametrize("seconds", [-1e308, -1.0, 1e308, 253_402_300_800.0, "soon", True, None, [1.0]])
@pytest.mark.parametrize("name", ["published-at", "visible-at", "expires-at"])
def test_a_time_that_popgate_would_not_write_is_a_header_like_any_other(name: str, seconds: HeaderValue) -> None:
    header = f"x-popgate-{name}"
    table = short_string(header) + field(header, seconds)
    raw = b"\x20\x40" + len(table).to_bytes(4, "big") + table + (1_795_000_000).to_bytes(8, "big")
    message = decoded(raw).message
    assert (message.published_at, message.visible_at, message.expires_at) == (1_795_000_000.0, None, None)
    assert message.headers == {f"amqp-{header}": seconds}
    letter = message._replace(copy_id=CopyId(COPY_ID))
    assert decoded(encoded(letter)).message == letter


@pytest.mark.parametrize("copy_id", ["", "c1", "z" * 32, COPY_ID.upper() + "A", "0" * 31, "0" * 33, 5, ["x"]])
def test_a_copy_id_of_another_form_identifies_nothing(copy_id: FieldValue) -> None:
    result = decoded(published_by_others(headers={"x-popgate-copy-id": copy_id}))
    assert not result.identified
    assert result.message.headers == {"amqp-x-popgate-copy-id": copy_id}


def test_an_ordering_key_that_is_too_long_is_a_header_like_any_other() -> None:
    header = "x-popgate-ordering-key"
    assert decoded(published_by_others(headers={header: "ü" * 127})).message.ordering_key == "ü" * 127
    message = decoded(published_by_others(headers={header: "ü" * 128})).message
    assert (message.ordering_key, message.headers) == (None, {f"amqp-{header}": "ü" * 128})


@pytest.mark.parametrize(
    ("count", "seconds"),
    [
        (1_795_000_000, 1_795_000_000.0),
        (1_795_000_000_250, 1_795_000_000.25),
        (1_795_000_000_250_000, 1_795_000_000.25),
        (1_795_000_000_250_000_000, 1_795_000_000.25),
        (2**64 - 1, 0.0),
    ],
)
def test_a_timestamp_may_count_anything_from_seconds_to_nanoseconds(count: int, seconds: float) -> None:
    message = decoded(b"\x00\x40" + count.to_bytes(8, "big")).message
    assert message.published_at == seconds
    assert message.headers == ({} if seconds else {"amqp-timestamp": str(count)})


def test_a_message_id_that_is_no_text_can_be_published_again() -> None:
    raw = b"\x00\x80\xff" + b"\xff" * 255
    message = decoded(raw).message
    assert message.message_id == ""
    assert message.headers == {"amqp-message-id": b64encode(b"\xff" * 255).decode()}
    letter = message._replace(copy_id=CopyId(COPY_ID))
    assert decoded(encoded(letter)).message == letter


@pytest.mark.parametrize("name", ["copy-id", "expires-at", "dead-headers-bytes", "dead-cause"])
def test_no_publisher_can_hide_a_header_of_popgates_behind_an_escape(name: str) -> None:
    header = f"x-popgate-header-x-popgate-{name}"
    message = decoded(published_by_others(headers={header: "f" * 32})).message
    assert message.headers == {f"amqp-{header}": "f" * 32}
    letter = message._replace(copy_id=CopyId(COPY_ID))
    assert decoded(encoded(letter)).message == letter


def test_a_header_that_would_replace_popgates_own_is_refused() -> None:
    message = decoded(published_by_others()).message._replace(copy_id=CopyId(COPY_ID))
    with pytest.raises(ValueError, match="x-popgate-copy-id"):
        encoded(message._replace(headers={"x-popgate-copy-id": "f" * 32}))


def test_a_table_that_ends_behind_its_parent_is_read_once() -> None:
    """Its bytes would be read again at each level: 233 bytes took 20 s."""
    value = b"V"
    for _ in range(30):
        fields = b"\x01a" + value
        value = b"F" + (len(fields) + 8).to_bytes(4, "big") + fields
    table = b"\x01a" + value * 2
    began = time.process_time()
    assert decoded(b"\x20\x00" + len(table).to_bytes(4, "big") + table).problem
    assert time.process_time() - began < 0.5


def test_unreadable_properties_are_handed_out_as_text() -> None:
    raw = b"\x20\x00\x00\x00\x00\x03\x01aq"
    assert decoded(raw).message.headers == {properties.UNREADABLE_HEADER: b64encode(raw).decode()}


def test_a_reply_to_that_would_close_the_publishers_channel_travels_as_a_header() -> None:
    message = Message(
        copy_id=CopyId(COPY_ID),
        message_id="m",
        body=b"body",
        headers={"amqp-reply-to": "amq.rabbitmq.reply-to"},
        ordering_key=None,
        published_at=0.0,
    )
    raw = encoded(message)
    header = ContentHeader()
    header.unmarshal(b"\x00\x3c\x00\x00" + bytes(8) + raw)
    assert header.properties.reply_to is None
    assert decoded(raw).message == message
