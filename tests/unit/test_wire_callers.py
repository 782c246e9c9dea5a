"""The caller of a forwarded request, in the header by which proxies pass it on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.permissions import Action, Caller, Grant, Limits, Principal
from popgate.wire.callers import CALLER_BYTES_MAX, decode_caller, encode_caller
from popgate.wire.errors import NotUnderstood

PATTERNS = st.lists(st.text(max_size=20), max_size=3).map(tuple)
ACTIONS = st.frozensets(st.sampled_from(Action))
GRANTS = st.builds(Grant, actions=ACTIONS, topics=PATTERNS, groups=PATTERNS, locks=PATTERNS, queues=PATTERNS)
NUMBERS = st.none() | st.integers(0, 2**40)
LIMITS = st.builds(
    Limits,
    requests_per_second=st.none() | st.floats(0, 1e9),
    parked_pops=NUMBERS,
    connections=NUMBERS,
    bytes_in_flight=NUMBERS,
    topics=NUMBERS,
)
CALLERS = st.builds(
    Caller,
    principal=st.builds(Principal, name=st.text(), grants=st.lists(GRANTS, max_size=3).map(tuple), limits=LIMITS),
    credential=st.text(),
    expires_at=st.none() | st.floats(0, 1e12),
)


@given(CALLERS)
def test_a_caller_is_read_as_it_was_written_from_one_line_of_ascii(caller: Caller) -> None:
    header = encode_caller(caller)
    assert decode_caller(header) == caller
    assert all(0x20 <= byte < 0x7F for byte in header)


def test_a_usual_caller_takes_little_room() -> None:
    grants = (Grant(actions=frozenset({Action.PUBLISH, Action.CONSUME}), topics=("orders-*",)),)
    caller = Caller(principal=Principal(name="billing", grants=grants), credential="k1")
    assert encode_caller(caller) == b'{"n":"billing","g":[{"a":["consume","publish"],"t":["orders-*"]}],"c":"k1"}'


def test_too_many_permissions_are_not_sent_and_not_read() -> None:
    patterns = tuple(f"{number:0200}" for number in range(64))
    grants = (Grant(actions=frozenset({Action.PUBLISH}), topics=patterns, groups=patterns),)
    with pytest.raises(NotUnderstood, match="the permissions of ann take more than 16 KiB"):
        encode_caller(Caller(principal=Principal(name="ann", grants=grants), credential="k1"))
    for header in (
        b'{"n":"%b","c":"k"}' % (b"x" * CALLER_BYTES_MAX),
        b'{"n":"x","c":"k","g":[%b]}' % b",".join([b'{"a":[]}'] * 65),
        b'{"n":"x","c":"k","g":[{"a":[],"t":[%b]}]}' % b",".join([b'"x"'] * 65),
    ):
        with pytest.raises(NotUnderstood, match="too many permissions"):
            decode_caller(header)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"n":"x"}',
        b'{"n":1,"c":"k"}',
        b'{"n":"x","c":"k","g":[{"a":["root"]}]}',
        b'{"n":"x","c":"k","g":[{}]}',
        b'{"n":"x","c":"k","e":"never"}',
        b'{"n":"\xff","c":"k"}',
        b"[" * 10_000,
    ],
)
def test_what_is_no_caller_is_not_understood(header: bytes) -> None:
    with pytest.raises(NotUnderstood):
        decode_caller(header)
