"""What is read with one regular expression is what would be read field by field, whatever the bytes are."""

import re
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from popgate.adapters.rabbitmq import properties
from popgate.adapters.rabbitmq.usual_properties import read_usual
from popgate.domain.identity import IdentityKeys
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId

KEYS = IdentityKeys([b"the secret of this test"])
QUEUE = BrokerQueue("popgate:orders:billing:0")
TAG, CHECK = KEYS.signer(QUEUE), KEYS.checker(QUEUE)
COPY_ID = CopyId(f"{7:032x}")
NOTHING = re.compile(rb"(?!)")


def encoded(**changes: object) -> bytes:
    usual = Message(COPY_ID, "m1", b"", {}, None, 1.5)
    return properties.encode(usual._replace(**changes), TAG(COPY_ID))  # type: ignore[arg-type]


def by_fields(raw: bytes, routing: bytes | None) -> properties.Decoded:
    with patch.object(properties, "read_usual", return_value=None), patch.object(properties, "BEGINNING", NOTHING):
        return properties.decode(raw, b"body", routing, check_tag=CHECK)


USUAL = encoded()
MESSAGES = st.sampled_from(
    [
        USUAL,
        encoded(message_id=""),
        encoded(message_id="ö" * 20),
        encoded(message_id="x" * 255),
        encoded(headers={"a": "b", "x-delivery-count": 3}),
        encoded(ordering_key="k", visible_at=2.5, expires_at=9.0),
    ]
)


def changed(raw: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for place, length, new in edits:
        at = place % (len(raw) + 1)
        raw = raw[:at] + new + raw[at + length :]
    return raw


EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 4), st.binary(max_size=4)), max_size=3)


@given(MESSAGES, EDITS, st.sampled_from([None, b"", b"\x08exchange\x03key"]))
@example(USUAL.replace(b"\x3f\xf8", b"\x7f\xf8"), [], None)  # published at: not a number
@example(USUAL.replace(b"\x3f\xf8", b"\xbf\xf8"), [], None)  # published before 1970
@example(USUAL[:-1] + b"\xff", [], None)
@example(USUAL + b"more", [], None)
@example(USUAL.replace(COPY_ID.encode(), COPY_ID.upper().encode().replace(b"0", b"A")), [], None)
def test_it_reads_what_the_fields_say(raw: bytes, edits: list[tuple[int, int, bytes]], routing: bytes | None) -> None:
    raw = changed(raw, edits)
    assert properties.decode(raw, b"body", routing, check_tag=CHECK) == by_fields(raw, routing)


@pytest.mark.parametrize("count", range(len(USUAL)))
def test_cut_off_properties_are_not_usual(count: int) -> None:
    assert read_usual(USUAL[:count], b"body") is None


def test_a_usual_message_is_read_at_once() -> None:
    """Otherwise the other tests of this file compare nothing."""
    found = read_usual(USUAL, b"body")
    assert found is not None
    assert found[0] == Message(COPY_ID, "m1", b"body", {}, None, 1.5)
    assert found[1] == TAG(COPY_ID)


def test_a_copied_tag_of_another_copy_is_rejected() -> None:
    forged = USUAL.replace(COPY_ID.encode(), f"{8:032x}".encode())
    assert read_usual(forged, b"body") is not None
    message, identified, _, problem = properties.decode(forged, b"body", None, check_tag=CHECK)
    assert (message.copy_id, identified) == ("", False)
    assert "identity tag" in problem
