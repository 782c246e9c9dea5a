"""Forwards whole requests to the proxy that must answer them, and returns the proxy's answer to the client.

The caller decides which proxy must answer. A request that was forwarded to this proxy is never forwarded again.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from msgspec import DecodeError, Struct, json
from starlette.types import ASGIApp, Receive, Scope, Send

from popgate.api.body import ClientGone, read_body
from popgate.api.connection import EXTENSION, Connection
from popgate.api.problems import problem_answer
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.api.scope_keys import caller_of, forwarding_of
from popgate.api.visit import Visit, visit_of
from popgate.api.whole_answers import send_answer
from popgate.domain.errors import PeerUnavailable, PopgateError
from popgate.domain.names import InstanceId
from popgate.engine.context.routing import while_owners_change
from popgate.engine.lease.pop_request import Presence
from popgate.ports.peers import ForwardedAnswer, ForwardedRequest, Peers
from popgate.runtime.timeouts import expire_now

_UNAVAILABLE = 503


class _Problem(Struct):
    code: str


_read_problem = json.Decoder(_Problem).decode

TargetOf: TypeAlias = Callable[[Scope], InstanceId | None]
"""Returns the peer proxy that must answer a request, or None if this proxy must answer. Raises: PopgateError; this
error is the answer to the client."""


def forwarded_request(scope: Scope, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> ForwardedRequest:
    """Return the request of ``scope`` in the form in which it is forwarded. ``headers`` are usually the headers of the
    scope."""
    path = scope.get("raw_path") or scope["path"].encode()
    return ForwardedRequest(
        scope["method"], path.decode("latin-1"), scope["query_string"], list(headers), body, caller=caller_of(scope)
    )


async def forward_request(
    peers: Peers,
    to: InstanceId,
    request: ForwardedRequest,
    *,
    wait_seconds: float | None = None,
    connection: Connection | None = None,
    visit: Visit | None = None,
) -> ForwardedAnswer:
    """Send the request to the proxy ``to``, and return its answer. If the client disconnects, or its ``visit`` ends,
    cancel the request immediately.

    Raises: PeerUnavailable; ClientGone if the client has disconnected; the errors of ``Visit.check``.
    """
    if connection is None:
        return await peers.forward(to, request, wait_seconds=wait_seconds)
    if connection.gone:
        raise ClientGone
    leaving = asyncio.timeout(None)
    try:
        async with leaving:
            connection.presence = Presence()
            connection.presence.on_leave = partial(expire_now, leaving)
            return await peers.forward(to, request, wait_seconds=wait_seconds)
    except TimeoutError:
        if leaving.expired():
            if visit is not None and not connection.gone:
                visit.check()
            raise ClientGone from None
        raise
    finally:
        connection.presence = None


def is_refused_for_now(answer: ForwardedAnswer) -> bool:
    """Return whether the other proxy answered with ``PeerUnavailable``: it can't answer the request, or can't answer it
    yet."""
    if answer.status != _UNAVAILABLE:
        return False
    try:
        return _read_problem(answer.body).code == PeerUnavailable.code
    except DecodeError:
        return False


async def send_forwarded_answer(
    answer: ForwardedAnswer,
    send: Send,
    connection: Connection | None = None,
    *,
    undo: Callable[[], None] | None = None,
) -> None:
    """Send another proxy's answer to the client. If the client does not receive the answer, ``undo`` is called to
    return the leases (see ``Connection``)."""
    headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
    if connection is not None and undo is not None:
        connection.answering(undo)
    await send_answer(send, connection, answer.status, headers, answer.body)


class ForwardingMiddleware:
    """ASGI middleware that forwards requests. If ``target_of`` returns a proxy, the request is forwarded to that proxy.

    ``sent`` is called with the proxy to which a request is sent. A
    request that is not forwarded costs only one call of ``target_of``. HEAD requests are never forwarded, because no
    forwarded path supports HEAD.
    """

    def __init__(
        self,
        app: ASGIApp,
        peers: Peers,
        target_of: TargetOf,
        *,
        sent: Callable[[InstanceId], None] = lambda _: None,
        request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> None:
        self._app = app
        self._peers = peers
        self._target_of = target_of
        self._sent = sent
        self._limit = request_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        may_forward = scope["type"] == "http" and scope["method"] != "HEAD"
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            to = await while_owners_change(partial(self._target, scope)) if may_forward else None
            if to is None or forwarding_of(scope) is not None:
                await self._app(scope, receive, send)  # a forwarded request is not forwarded again
                return
            self._sent(to)
            body = await read_body(receive, dict(scope["headers"]), self._limit)
            request = forwarded_request(scope, body, scope["headers"])
            answer = await forward_request(self._peers, to, request, connection=connection, visit=visit_of(scope))
        except ClientGone:
            return
        except PopgateError as error:
            answer = _problem(error)
        await send_forwarded_answer(answer, send, connection)

    async def _target(self, scope: Scope) -> InstanceId | None:
        """Return the peer proxy that must answer, or None for this proxy. Raises: PeerUnavailable while no proxy can
        answer."""
        return self._target_of(scope)


def _problem(error: PopgateError) -> ForwardedAnswer:
    status, headers, body = problem_answer(error)
    return ForwardedAnswer(status, [header for header in headers if header[0] != b"content-length"], body)
