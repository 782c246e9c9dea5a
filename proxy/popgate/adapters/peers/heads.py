"""Builds the heads of HTTP requests between proxies, and selects the headers of a peer's answer that a client receives.

All functions are pure.
"""

from collections.abc import Iterable

from popgate.domain.names import InstanceId
from popgate.ports.peers import ForwardedRequest
from popgate.wire.admission import (
    CALLER,
    CLIENT_ID,
    CONTENT_TYPE,
    PASSED_BY,
    PEERS_PATH,
    REQUEST_ID,
    RESERVED_PREFIX,
    TO,
    WAIT_SECONDS,
)
from popgate.wire.callers import encode_caller

Headers = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that apply to one connection only (RFC 9110, section 7.6.1)."""
_ABOUT_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that are not forwarded. ``api.browsers`` has already checked them at the proxy that the client reached. The
same check could fail at the peer, which has another host name."""
_CREDENTIALS = frozenset({b"authorization", b"cookie"})
"""Headers that are not forwarded. The proxy that the client reached has already authenticated it."""
_FORMS = frozenset({b"accept", b"content-type"})
_NOT_ASKED_AGAIN = _HOP_BY_HOP | _ABOUT_BROWSERS | _CREDENTIALS | {b"content-length", b"expect", b"host"}
_NOT_ANSWERED_AGAIN = _HOP_BY_HOP | {b"content-length", b"date", b"server", REQUEST_ID}
"""Headers of a peer's answer that the client does not receive, because they describe the connection to the peer, or
because this proxy's own HTTP server sets them."""


def message_head(authority: bytes, to: InstanceId, size: int, request_id: str | None = None) -> bytes:
    """Return the head of a request that sends a message of ``size`` bytes to the proxy ``to``. ``request_id``: the id
    of the client's request for which it is sent."""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b: %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n" % (
        PEERS_PATH.encode(),
        authority,
        TO,
        to.encode(),
        CONTENT_TYPE,
        b"" if request_id is None else b"%b: %b\r\n" % (REQUEST_ID, request_id.encode()),
        size,
    )


def watch_head(authority: bytes, to: InstanceId) -> bytes:
    """Return the head of a request whose answer ends when the proxy ``to`` begins to leave the cluster."""
    return b"GET %b HTTP/1.1\r\nhost: %b\r\n%b: %b\r\n\r\n" % (PEERS_PATH.encode(), authority, TO, to.encode())


def passing_head(
    authority: bytes,
    to: InstanceId,
    request: ForwardedRequest,
    passed_by: InstanceId,
    wait_seconds: float | None,
) -> bytes:
    """Return the head with which a client's request is forwarded to the proxy ``to``.

    It omits headers that concern only the client's connection, its credentials, and headers that only peers may set.
    Raises: NotUnderstood if the caller has too many permissions.
    """
    target = request.path.encode("latin-1") + (b"?" + request.query if request.query else b"")
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), target), b"host: " + authority]
    dropped = _NOT_ASKED_AGAIN | _named_by_connection(request.headers)
    for name, value in request.headers:
        if name not in dropped and not name.startswith(RESERVED_PREFIX):
            lines.append(b"%b: %b" % (name, value))
    lines.append(b"%b: %b" % (TO, to.encode()))
    lines.append(b"%b: %b" % (PASSED_BY, passed_by.encode()))
    if wait_seconds is not None:
        lines.append(b"%b: %b" % (WAIT_SECONDS, repr(float(wait_seconds)).encode()))
    if request.client_id is not None:
        lines.append(b"%b: %b" % (CLIENT_ID, request.client_id.encode()))
    if request.caller is not None:
        lines.append(b"%b: %b" % (CALLER, encode_caller(request.caller)))
    lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
    return b"\r\n".join(lines)


def client_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a peer's answer that the client should receive."""
    headers = list(headers)
    dropped = _NOT_ANSWERED_AGAIN | _named_by_connection(headers)
    return [(name, value) for name, value in headers if name not in dropped and not name.startswith(RESERVED_PREFIX)]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Return the headers of this connection only. Those that decide the forms of body and answer are never among them:
    both proxies must use the same forms."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b",")) - _FORMS
