"""Serves the other proxies, on their own socket. Nothing else is served there.

    POST /v1/peers   a message (``wire``) -> its answer, or its error, both as 200
    GET /v1/peers    answers 200 at once, and ends the answer when this proxy begins to stop: if the connection ends
                     without that, the proxy was killed
    POST /v1/peers/traces   receipt handles -> the trace contexts of their leases; only with --tracing
    any path         a client's request that another proxy forwards (``PASSED_BY``)

The certificate of a connection names the proxy that opened it. A request that claims to be from another proxy is
answered with 401, and a request that is addressed to another instance, which used this address before, with 421, both
before their bodies are read.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from popgate.api.asked import allow
from popgate.api.body import ClientGone, read_body
from popgate.api.connection import EXTENSION, Connection
from popgate.api.problems import (
    HttpError,
    NotAPeer,
    NotFound,
    WrongInstance,
    internal_problem,
    problem_answer,
)
from popgate.api.request_ids import given_request_id
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.api.scope_keys import CALLER, FORWARDING, Forwarding
from popgate.api.whole_answers import send_answer
from popgate.domain.errors import PopgateError, RetryLater
from popgate.domain.names import ClientId, InstanceId
from popgate.domain.topics import WAIT_SECONDS_MAX
from popgate.engine.lease.pop_request import Presence
from popgate.ports.peers import PeerAnswers, PeerMessage
from popgate.runtime.current_request import serving_request
from popgate.wire import admission
from popgate.wire.admission import (
    CLIENT_ID,
    CONTENT_TYPE,
    PASSED_BY,
    PEER_PATHS,
    REQUEST_ID,
    TO,
    TRACES_PATH,
    WAIT_SECONDS,
    instance_in,
)
from popgate.wire.callers import decode_caller
from popgate.wire.codec import CODEC, Codec
from popgate.wire.errors import NotUnderstood

_log = logging.getLogger(__name__)


class PeerApp:
    """The ASGI application on the socket for peers. It passes clients' requests that other proxies forward to
    ``public_app``, and messages to ``face``.

    ``authenticates``: this proxy knows callers, so a forwarded request must name its caller. ``count`` is called with
    the name of an operation and the status of each answered message and refused request.
    """

    def __init__(
        self,
        face: "PeerFace",
        public_app: ASGIApp,
        *,
        authenticates: bool,
        count: Callable[[str, int], None] = lambda _operation, _status: None,
    ) -> None:
        self._face = face
        self._public_app = public_app
        self._authenticates = authenticates
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if scope["path"] in PEER_PATHS:
                self._count("peers", await self._face.serve(scope, receive, send))
                return
            self._let_pass(scope)
        except ClientGone:
            return
        except PopgateError as error:
            status, headers, answer = problem_answer(error)
            self._count("refused", status)
            await send_answer(send, scope.get("extensions", {}).get(EXTENSION), status, headers, answer)
            return
        await self._public_app(scope, receive, send)

    def _let_pass(self, scope: Scope) -> None:
        """Record in the scope how the request was forwarded, and its caller. Raises: PopgateError."""
        headers = dict(scope["headers"])
        if PASSED_BY not in headers:
            raise NotFound(scope["path"])
        scope[FORWARDING] = self._face.forwarding(headers, certified_instance(scope))
        caller = headers.get(admission.CALLER)
        if (caller is not None) is not self._authenticates:
            here, there = ("authenticates", "does not") if self._authenticates else ("does not authenticate", "does")
            raise HttpError(
                HTTPStatus.FORBIDDEN,
                "forbidden",
                f"this proxy {here} its clients, but the forwarding proxy {there}; give both the same keys",
            )
        if caller is not None:
            try:
                scope[CALLER] = decode_caller(caller)
            except NotUnderstood as error:
                raise HttpError(400, error.code, error.detail) from error


class PeerFace:
    """Answers requests that the peers of the proxy ``me`` send to it. ``codec`` reads and writes the supported protocol
    versions. ``traces`` answers ``TRACES_PATH``; it is None if this proxy traces nothing.
    """

    def __init__(
        self,
        me: InstanceId,
        answers: PeerAnswers,
        codec: Codec = CODEC,
        traces: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._me = me
        self._answers = answers
        self._codec = codec
        self._traces = traces

    def forwarding(self, headers: Mapping[bytes, bytes], sender: InstanceId | None) -> Forwarding:
        """Return how the proxy ``sender`` forwarded a request with these headers. Raises: NotAPeer if the headers name
        another sender; WrongInstance."""
        self._check_addressee(headers)
        by = headers[PASSED_BY].decode("latin-1")
        if sender is None or by != sender:
            raise NotAPeer
        wait = headers.get(WAIT_SECONDS)
        client = headers.get(CLIENT_ID)
        return Forwarding(
            sender,
            None if wait is None else _wait_seconds(wait),
            None if client is None else ClientId(client.decode("latin-1")),
        )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer a request for one of ``PEER_PATHS``, and return the status. Raises: ClientGone."""
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        headers: Sequence[tuple[bytes, bytes]]
        try:
            given = dict(scope["headers"])
            sender = certified_instance(scope)
            if sender is None:
                raise NotAPeer
            self._check_addressee(given)
            is_about_traces = scope["path"] == TRACES_PATH
            allow(scope["method"], *(("POST",) if is_about_traces else ("GET", "POST")))
            if scope["method"] == "GET":
                await _hold(send, connection)
                return 200
            body = await read_body(receive, given, REQUEST_BYTES_MAX)
            request_id = given_request_id(scope["headers"]) if REQUEST_ID in given else None
            answer = self._traces_of(body) if is_about_traces else await self._answer(sender, body, request_id)
            status, headers = 200, ((b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(answer)))
        except ClientGone:
            raise
        except PopgateError as error:
            status, headers, answer = problem_answer(error)
        except Exception as error:
            status, headers, answer = internal_problem(error, operation="peers")
        await send_answer(send, connection, status, headers, answer)
        return status

    def _check_addressee(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises: WrongInstance if the request is not addressed to this instance."""
        to = headers.get(TO, b"").decode("latin-1")
        if to != self._me:
            raise WrongInstance(to, self._me)

    def _traces_of(self, body: bytes) -> bytes:
        """Return the contexts of leases. Raises: NotFound; HttpError if the body can't be decoded."""
        if self._traces is None:
            raise NotFound(TRACES_PATH)
        try:
            return self._traces(body)
        except ValueError as error:
            raise HttpError(400, NotUnderstood.code, f"not a list of receipt handles: {error}") from error

    async def _answer(self, sender: InstanceId, body: bytes, request_id: str | None) -> bytes:
        """Return the encoded answer to the message of ``sender``, or the encoded error. ``request_id``: the id of the
        client's request for which it was sent. Raises: HttpError if the message can't be decoded; NotAPeer if it names
        another sender."""
        try:
            version, named, message = self._codec.decode_message(body)
        except NotUnderstood as error:
            raise HttpError(400, error.code, error.detail) from error
        if named != sender:
            raise NotAPeer
        if request_id is None:
            return await self._encoded_answer(version, sender, message)
        with serving_request(request_id):
            began = monotonic()
            answer = await self._encoded_answer(version, sender, message)
            fields: dict[str, Any] = {"message_type": type(message).__name__, "sender": sender}
            _log.debug("a message of another proxy", extra={**fields, "seconds": round(monotonic() - began, 6)})
            return answer

    async def _encoded_answer(self, version: int, sender: InstanceId, message: PeerMessage[Any]) -> bytes:
        try:
            return self._codec.encode_answer(version, message, await self._answers.answer(sender, message))
        except PopgateError as error:
            return self._codec.encode_error(version, error)
        except Exception as error:  # a bug of popgate: the peer receives no details
            _log.error("a peer's message failed", exc_info=error, extra={"message_type": type(message).__name__})
            failure = RetryLater(f"proxy {self._me} has failed; its log says more")
            return self._codec.encode_error(version, failure)


def certified_instance(scope: Scope) -> InstanceId | None:
    """Return the instance that the certificate of a request's connection names."""
    connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    certificate = None if connection is None else connection.certificate
    return None if certificate is None else instance_in(certificate.names)


async def _hold(send: Send, connection: Connection | None) -> None:
    """Start an answer, and end it when this proxy begins to stop or the peer disconnects."""
    ended = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"here\n", "more_body": True})
    try:
        if connection is not None and not connection.gone:
            connection.on_shutdown = end
            connection.presence = Presence()
            connection.presence.on_leave = end
            await ended
    finally:  # also if cancelled: the server cancels running requests when it stops
        if connection is not None:
            connection.presence = connection.on_shutdown = None
        await send({"type": "http.response.body", "body": b"leaving\n"})


def _wait_seconds(header: bytes) -> float:
    """Parse a peer's waiting time; an invalid value means 0."""
    try:
        return min(max(0.0, float(header)), WAIT_SECONDS_MAX)
    except ValueError:
        return 0.0
