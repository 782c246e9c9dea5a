"""Converts errors to HTTP answers: RFC 9457 problem documents with a stable ``code``.

One table maps errors to statuses, for both the data plane and the admin interface. If an external system has failed,
the answer contains the text of the error. A bug of popgate is logged once, and answered without details.
"""

import logging
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import orjson
from msgspec import UNSET, Struct, UnsetType

from popgate.api.request_ids import new_request_id
from popgate.domain.errors import (
    BrokerUnavailable,
    Conflict,
    DeadLetterNotFound,
    Fenced,
    Forbidden,
    GroupNotFound,
    InvalidRequest,
    LeaseGroupAcked,
    LeaseGroupExpired,
    LeaseGroupNotFound,
    LimitExceeded,
    LockHeld,
    LockLost,
    LockNotFound,
    LockUnavailable,
    MessageTooLarge,
    NotAMember,
    PeerUnavailable,
    PopgateError,
    QueueGone,
    QuotaExceeded,
    RedriveNotFound,
    RequestError,
    RetryLater,
    StateUnavailable,
    TooManyInFlight,
    TooManyPops,
    TopicNotFound,
    Unauthenticated,
    WrongMode,
)
from popgate.runtime.current_request import current_request_id
from popgate.wire.admission import NOT_A_PEER, REFUSALS, REQUEST_ID, WRONG_INSTANCE

_log = logging.getLogger(__name__)

CONTENT_TYPE = b"application/problem+json"
TYPE_PREFIX = "urn:popgate:problem:"
DETAIL_LENGTH_MAX = 2_000
QUOTED_LENGTH_MAX = 80


class Problem(Struct, kw_only=True, omit_defaults=True):
    """A problem document, as a client reads it."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    field: str | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    setting: str | UnsetType = UNSET
    action: str | UnsetType = UNSET
    outcome_unknown: bool | UnsetType = UNSET


class HttpError(PopgateError):
    """An error for which HTTP defines a status: an unknown path, a wrong method, an unreadable content type."""

    def __init__(self, status: int, code: str, detail: str, *, allow: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.allow = allow


class RequestTimeout(HttpError):
    def __init__(self, detail: str) -> None:
        super().__init__(408, "request_timeout", detail)


class HeadTooLarge(HttpError):
    def __init__(self, detail: str, *, status: int = 431) -> None:
        super().__init__(status, "head_too_large", detail)


class NotFound(HttpError):
    def __init__(self, path: str) -> None:
        super().__init__(404, "not_found", f"there is nothing at {path[:200]!r}; GET /v1 and /docs list what exists")


class ProxyNotFound(HttpError):
    def __init__(self, proxy: str) -> None:
        shown = proxy[:QUOTED_LENGTH_MAX]
        detail = f"{shown!r} is no member of the cluster; GET /v1/admin/cluster lists them"
        super().__init__(404, "proxy_not_found", detail)


class MethodNotAllowed(HttpError):
    def __init__(self, allow: str) -> None:
        super().__init__(405, "method_not_allowed", f"this path accepts {allow}", allow=allow)


class UnsupportedMediaType(HttpError):
    def __init__(self, detail: str) -> None:
        super().__init__(415, "unsupported_media_type", detail)


class HostNotAllowed(HttpError):
    def __init__(self, host: str) -> None:
        shown = host[:QUOTED_LENGTH_MAX]
        remedy = f"use an IP address or localhost, or start popgate with --allowed-hosts {shown}"
        super().__init__(403, "host_not_allowed", f"host: {shown!r} is not a name of this proxy; {remedy}")


class NotAPeer(HttpError):
    def __init__(self) -> None:
        detail = "the certificate of this connection is not that of the proxy that the request names"
        super().__init__(REFUSALS[NOT_A_PEER], NOT_A_PEER, detail)


class WrongInstance(HttpError):
    def __init__(self, wanted: str, me: str) -> None:
        detail = f"this request is for proxy {wanted[:QUOTED_LENGTH_MAX]!r}, but this is proxy {me}"
        super().__init__(REFUSALS[WRONG_INSTANCE], WRONG_INSTANCE, detail)


class InternalError(HttpError):
    def __init__(self) -> None:
        super().__init__(500, "internal_error", "popgate has failed; see its log. The request may be repeated.")


class NotReady(RetryLater):
    """The process can't serve requests now. This is an answer to /readyz."""

    code = "not_ready"


class Overloaded(RetryLater):
    """Clients use all connections, or all memory for large requests, that the limits allow."""

    code = "overloaded"


class _Kind(NamedTuple):
    status: int
    title: str


TABLE: dict[type[PopgateError], _Kind] = {
    InvalidRequest: _Kind(400, "The request is not valid"),
    TopicNotFound: _Kind(404, "The topic does not exist"),
    GroupNotFound: _Kind(404, "The group does not exist"),
    DeadLetterNotFound: _Kind(404, "The dead letter does not exist"),
    RedriveNotFound: _Kind(404, "There is no redrive"),
    QueueGone: _Kind(404, "A queue of the topic does not exist on the broker"),
    LeaseGroupNotFound: _Kind(404, "The lease group does not exist"),
    LeaseGroupExpired: _Kind(409, "The leases of the lease group have expired"),
    LeaseGroupAcked: _Kind(410, "The lease group was acked"),
    LockNotFound: _Kind(404, "The lock does not exist"),
    LockLost: _Kind(409, "The lock is no longer held"),
    LockHeld: _Kind(503, "Another client is changing the lock"),
    LockUnavailable: _Kind(503, "No lock can be granted"),
    Conflict: _Kind(409, "The request contradicts what exists"),
    QuotaExceeded: _Kind(409, "A quota is exhausted"),
    WrongMode: _Kind(409, "The subscription is in another consume mode"),
    Fenced: _Kind(409, "The generation is outdated"),
    MessageTooLarge: _Kind(413, "A message, or the request, is too large"),
    RequestError: _Kind(400, "The request is not valid"),
    BrokerUnavailable: _Kind(503, "The broker can't be reached"),
    StateUnavailable: _Kind(503, "The state store can't be reached"),
    PeerUnavailable: _Kind(503, "The proxy that must answer does not respond"),
    NotAMember: _Kind(503, "The state store can't be reached"),
    TooManyInFlight: _Kind(429, "Too many messages are in flight"),
    TooManyPops: _Kind(429, "Too many pops are waiting"),
    LimitExceeded: _Kind(429, "A limit of the principal is reached"),
    Unauthenticated: _Kind(401, "The caller is not known"),
    Forbidden: _Kind(403, "The caller may not do this"),
    Overloaded: _Kind(503, "The proxy is overloaded"),
    NotReady: _Kind(503, "popgate is not ready"),
    RetryLater: _Kind(503, "Not available now"),
    RequestTimeout: _Kind(408, "The request arrived too slowly"),
    HeadTooLarge: _Kind(431, "The head of the request is too large"),
    NotFound: _Kind(404, "There is nothing at this path"),
    ProxyNotFound: _Kind(404, "The proxy is not a member of the cluster"),
    MethodNotAllowed: _Kind(405, "This path does not support the method"),
    UnsupportedMediaType: _Kind(415, "The content type is not supported"),
    HostNotAllowed: _Kind(403, "The host is not a name of this proxy"),
    NotAPeer: _Kind(401, "The certificate is that of another proxy"),
    WrongInstance: _Kind(421, "The request is for another proxy"),
    InternalError: _Kind(500, "popgate has failed"),
    HttpError: _Kind(400, "The request is not valid"),
    PopgateError: _Kind(500, "popgate has failed"),
}


def kind_of(error: PopgateError) -> _Kind:
    """Return the row of the table for the error's class, or for its nearest base class in the table. The row of the
    root class has status 500."""
    for family in type(error).__mro__:
        kind = TABLE.get(family)
        if kind is not None:
            return kind
    raise AssertionError("the table contains the root class")


class ProblemAnswer(NamedTuple):
    """The HTTP answer for an error, ready to be sent."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


def problem_answer(error: PopgateError) -> ProblemAnswer:
    """Return the answer for an error: the status, the problem document, ``Retry-After`` and ``Allow``."""
    status, title = kind_of(error)
    if isinstance(error, HttpError):
        status = error.status
    document: dict[str, Any] = {
        "type": TYPE_PREFIX + error.code,
        "title": title,
        "status": status,
        "code": error.code,
        "detail": error.detail[:DETAIL_LENGTH_MAX],
    }
    if isinstance(error, (InvalidRequest, MessageTooLarge)) and error.field:
        document["field"] = error.field
    if isinstance(error, WrongMode):
        document["mode"] = error.mode
    if isinstance(error, QuotaExceeded):
        document["setting"] = error.setting
    if isinstance(error, Forbidden):
        document["action"] = error.action
    if isinstance(error, BrokerUnavailable) and error.outcome_unknown:
        document["outcome_unknown"] = True
    body = _encode(document)
    headers = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(body))]
    if isinstance(error, RetryLater):
        headers.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b'Bearer realm="popgate"'))
    if isinstance(error, HttpError) and error.allow:
        headers.append((b"allow", error.allow.encode()))
    return ProblemAnswer(status, headers, body)


def internal_problem(error: BaseException, *, operation: str) -> ProblemAnswer:
    """Log a bug of popgate with its traceback, and return the answer to the client, which contains no details, but the
    id of the request in the log."""
    given = current_request_id()
    request_id = given or new_request_id()
    _log.error(
        "a request failed unexpectedly", exc_info=error, extra={"operation": operation, "request_id": request_id}
    )
    answer = problem_answer(InternalError())
    if given is None:  # otherwise every answer to the request has its id
        answer = answer._replace(headers=[*answer.headers, (REQUEST_ID, request_id.encode())])
    return answer


def _encode(document: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:  # a detail or a field quotes a lone surrogate
        clean = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in document.items()
        }
        return orjson.dumps(clean)
