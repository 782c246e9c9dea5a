"""Heads of requests between proxies: a client's own headers pass; peer headers and connection headers do not."""

from typing import Any

import pytest

from popgate.adapters.peers.heads import client_headers, message_head, passing_head, watch_head
from popgate.adapters.peers.pool import address_parts
from popgate.domain.names import ClientId, InstanceId
from popgate.domain.permissions import Caller, Principal
from popgate.ports.peers import ForwardedRequest
from popgate.wire.admission import instance_in, instance_uri

B = InstanceId("b")


def passed(
    *headers: tuple[bytes, bytes],
    query: bytes = b"",
    wait_seconds: float | None = None,
    client_id: ClientId | None = None,
    caller: Caller | None = None,
) -> list[bytes]:
    request = ForwardedRequest("POST", "/v1/topics/%C3%A4", query, headers, b"12345", client_id, caller)
    head = passing_head(b"h:1", B, request, InstanceId("a"), wait_seconds)
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


OWN = [b"host: h:1", b"popgate-to: b", b"popgate-passed-by: a", b"content-length: 5"]


def test_a_request_keeps_its_path_its_query_and_its_own_headers_in_order() -> None:
    lines = passed((b"accept", b"a/b"), (b"x-own", b"1"), (b"x-own", b"2"), query=b"a=%20&b")
    assert lines[0] == b"POST /v1/topics/%C3%A4?a=%20&b HTTP/1.1"
    assert [line for line in lines[1:] if line not in OWN] == [
        b"accept: a/b",
        b"x-own: 1",
        b"x-own: 2",
    ]
    assert set(OWN) < set(lines)


def test_who_pops_is_said_by_the_proxy_alone() -> None:
    assert b"popgate-client-id: c-1" in passed((b"popgate-client-id", b"somebody"), client_id=ClientId("c-1"))
    assert not any(line.startswith(b"popgate-client-id") for line in passed((b"popgate-client-id", b"somebody")))


def test_the_caller_is_passed_and_the_credential_that_proved_it_is_not() -> None:
    ann = Caller(principal=Principal(name="ann"), credential="k1")
    given = ((b"authorization", b"Bearer pg_k1_x"), (b"cookie", b"y"), (b"popgate-caller", b"z"))
    assert sorted(passed(*given, caller=ann)[1:]) == sorted([*OWN, b'popgate-caller: {"n":"ann","c":"k1"}'])
    assert sorted(passed(*given)[1:]) == sorted(OWN)


def test_a_wait_is_said_where_it_is_given() -> None:
    assert b"popgate-wait-seconds: 0.0" in passed(wait_seconds=0)
    assert not any(line.startswith(b"popgate-wait-seconds") for line in passed())


@pytest.mark.parametrize(
    "name",
    [
        "connection",
        "keep-alive",
        "te",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "expect",
        "host",
        "x-of-this-connection",
        "authorization",
        "cookie",
        "popgate-caller",
        "popgate-passed-by",
        "popgate-wait-seconds",
        "popgate-to",
        "popgate-of-a-later-release",
    ],
)
def test_what_speaks_of_the_connection_or_only_peers_may_say_does_not_pass(name: str) -> None:
    lines = passed((name.encode(), b"foreign"), (b"connection", b"close, X-Of-This-Connection"))
    assert sorted(lines[1:]) == sorted(OWN)


def test_the_forms_of_body_and_answer_pass_whatever_the_connection_header_names() -> None:
    lines = passed((b"accept", b"application/msgpack"), (b"connection", b"Accept, x-this"), (b"x-this", b"1"))
    assert b"accept: application/msgpack" in lines
    assert b"x-this: 1" not in lines


def test_an_answer_keeps_what_is_for_the_client() -> None:
    kept = [(b"content-type", b"x"), (b"retry-after", b"1"), (b"allow", b"GET")]
    dropped = [(b"date", b"x"), (b"server", b"x"), (b"content-length", b"1"), (b"transfer-encoding", b"chunked")]
    dropped.append((b"x-request-id", b"the proxy that the client asked answers with it"))
    named = [(b"connection", b"x-this"), (b"x-this", b"1")]
    assert client_headers([*dropped, *kept, *named]) == kept


def test_a_message_and_a_watch_say_who_is_meant() -> None:
    for head in (message_head(b"h:1", B, 7), watch_head(b"h:1", B)):
        assert b" /v1/peers HTTP/1.1\r\nhost: h:1\r\npopgate-to: b\r\n" in head
    assert b"content-length: 7\r\n" in message_head(b"h:1", B, 7)


def test_a_certificate_names_one_instance() -> None:
    assert instance_in([instance_uri(B)]) == B
    assert instance_in(["b", "spiffe://b", instance_uri(B)]) == B
    for names in ([], ["b"], [instance_uri(InstanceId(""))], [instance_uri(B), instance_uri(InstanceId("c"))]):
        assert instance_in(names) is None


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("https://h:8080", ("h", 8080, b"h:8080")),
        ("https://h", ("h", 443, b"h")),
        ("https://[::1]:1/", ("::1", 1, b"[::1]:1")),
    ],
)
def test_the_address_of_a_peer_is_an_https_url(address: str, parts: tuple[str, int, bytes]) -> None:
    assert address_parts(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "h:1", "http://h:1", "https://", "https://h:99999", "https://h:0", "https://h:1/path", "https://u@h:1"),
        *("https://a\0b:1", "https://h:1\r\nx: y", "https://h\n:1", "https://\ud800:1", "https://[::1", "https://ü:1"),
        *(5, None, ["https://h:1"]),
    ],
)
def test_what_is_no_address_of_a_peer_is_refused(address: Any) -> None:
    with pytest.raises(ValueError, match="is not a peer's address"):
        address_parts(address)
