"""Logs each request in one line, and gives requests their ids.

Theory of operation. ``ObservedRequests`` wraps the whole application. It is not in the way of a usual request: the
protocol calls it only for requests that have an id, or for all requests while they are logged, which is at the level
debug (``HttpConfig.observe``). So a request costs nothing more while requests are not logged.

The status of an answer, its messages and its header with the id are read from, or added to, the bytes that are written
to the connection. So every answer is covered, also one that was forwarded, refused or written without uvicorn.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, TypeAlias, cast

from msgspec import DecodeError, Raw, Struct, json, msgpack
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from popgate.api.access import ACCESS
from popgate.api.formats import MSGPACK
from popgate.api.problems import HttpError
from popgate.api.request_ids import given_request_id, new_request_id
from popgate.api.scope_keys import caller_of, forwarding_of
from popgate.domain.permissions import Resource
from popgate.runtime.current_request import serving_request
from popgate.wire.admission import PEER_PATHS, REQUEST_ID

_log = logging.getLogger(__name__)

COUNTED_BYTES_MAX = 4 << 20
"""Maximum size of an answer whose messages are counted, for which it is copied."""
PATH_LENGTH_MAX = 200
"""Maximum number of characters of a path in a log line."""
_END = b"\r\n"
_PACKED = b"content-type: %b" % MSGPACK.encode()
_INFORMATIONAL = 200


class _Counted(Struct):
    """The lists in the answers of the data plane."""

    messages: list[Raw] | None = None
    results: list[Raw] | None = None


_in_json, _packed = json.Decoder(_Counted).decode, msgpack.Decoder(_Counted).decode


WithinTrace: TypeAlias = Callable[[Iterable[tuple[bytes, bytes]]], AbstractContextManager[None]]
"""Continues the trace that the headers of a request name, within the returned context."""


class ObservedRequests:
    """Serves ``app``. Requests get ids, and are logged at the level debug. If ``within_trace`` is given, they are part
    of their traces."""

    def __init__(self, app: ASGIApp, within_trace: WithinTrace | None = None) -> None:
        self._app = app
        self._within_trace = within_trace or _untraced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if scope["type"] != "http" or scope["path"] in PEER_PATHS or not isinstance(cycle, RequestResponseCycle):
            await self._app(scope, receive, send)
            return
        began, is_counted = monotonic(), is_logged()
        request_id = given_request_id(scope["headers"])
        if not is_counted and all(name != REQUEST_ID for name, _ in scope["headers"]):  # it is only traced
            with self._within_trace(scope["headers"]):
                await self._app(scope, receive, send)
            return
        if request_id is None:
            request_id = new_request_id()
            others = [header for header in scope["headers"] if header[0] != REQUEST_ID]
            scope["headers"] = [*others, (REQUEST_ID, request_id.encode())]  # another proxy gets it, too
        answer = ObservedAnswer(cycle.transport, request_id, is_counted=is_counted)
        cycle.transport = cast("Any", answer)
        with serving_request(request_id), self._within_trace(scope["headers"]):
            try:
                await self._app(scope, receive, send)
            finally:
                if is_counted:
                    _log.debug("request", extra=_facts(scope, answer, monotonic() - began))


class ObservedAnswer:
    """The transport of one answer: adds the header with the id, and notes the status. If ``is_counted``, the messages
    in the answer are counted."""

    __slots__ = ("_content", "_inner", "_is_counted", "_line", "status")

    def __init__(self, inner: Any, request_id: str, *, is_counted: bool) -> None:
        self.status: int | None = None
        """The status of the answer, or None if there is none yet."""
        self._inner = inner
        self._line = b"%b: %b\r\n" % (REQUEST_ID, request_id.encode())
        self._is_counted = is_counted
        self._content = bytearray()

    def write(self, data: bytes) -> None:
        if self.status is None and (status := int(data[9:12])) >= _INFORMATIONAL:  # not ``100 Continue``
            self.status = status
            end = data.index(_END) + len(_END)
            data = b"%b%b%b" % (data[:end], self._line, data[end:])
        if self._is_counted and self.status is not None and len(self._content) <= COUNTED_BYTES_MAX:
            self._content += data
        self._inner.write(data)

    def count(self) -> int | None:
        """Return the number of messages, or of results, in the answer. Return None if it contains none of them."""
        head, _, body = bytes(self._content).partition(2 * _END)
        if not self._is_counted or len(self._content) > COUNTED_BYTES_MAX:
            return None
        try:
            counted = (_packed if _PACKED in head else _in_json)(body)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            return None
        found = counted.results if counted.messages is None else counted.messages
        return None if found is None else len(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _untraced(_headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[None]:
    return nullcontext()


def _facts(scope: Scope, answer: ObservedAnswer, seconds: float) -> dict[str, Any]:
    """Return the fields of the line about a request."""
    facts = {**request_facts(scope), "status": answer.status, "seconds": round(seconds, 6)}
    if (count := answer.count()) is not None:
        facts["count"] = count
    return facts


def is_logged() -> bool:
    """Return whether requests are logged at the present level."""
    return _log.isEnabledFor(logging.DEBUG)


def request_facts(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a log line that say what a request is, and whose."""
    facts: dict[str, Any] = {"method": scope["method"]}
    operation, resource = _operation(scope["method"], scope["path"])
    if operation is None:
        facts["path"] = scope["path"][:PATH_LENGTH_MAX]
    else:
        facts["operation"] = operation
    if resource is not None:
        facts |= {name: value for name, value in resource._asdict().items() if value is not None}
    caller, forwarding, client = caller_of(scope), forwarding_of(scope), scope["client"]
    if caller is not None:
        facts |= {"principal": caller.principal.name, "key": caller.credential}
    if forwarding is not None:
        facts["forwarded_by"] = forwarding.by
    elif client is not None:
        facts["address"] = client[0]
    return facts


def _operation(method: str, path: str) -> tuple[str | None, Resource | None]:
    """Return the name of an operation and its resource, or None if there is no such operation."""
    try:
        access, parameters = ACCESS.find(method, path)
    except HttpError:
        return None, None
    return access.operation, None if access.resource is None else access.resource(parameters)
