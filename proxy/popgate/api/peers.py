"""Answers the other proxies at ``/v1/peers``: their messages, and their question whether this proxy is alive.

    POST   a message (``wire``) -> its answer, or its error, both as 200
    GET    answers 200 at once, and ends the answer when this proxy begins to stop: if the connection ends without
           that, the proxy was killed

A request with a token of another secret is answered with 401, before its body is read. A request that is addressed to
another instance, which used this address before, is answered with 421.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from popgate.api.asked import allow
from popgate.api.body import ClientGone, read_body
from popgate.api.connection import EXTENSION, Connection, send_answer
from popgate.api.problems import HttpError, NotAPeer, WrongInstance, internal_problem, problem_answer
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.domain.errors import PopgateError, RetryLater
from popgate.domain.names import ClientId, InstanceId
from popgate.domain.topics import WAIT_SECONDS_MAX
from popgate.engine.lease.pop_request import Presence
from popgate.ports.peers import PeerAnswers
from popgate.wire.admission import (
    CLIENT_ID,
    CONTENT_TYPE,
    PASSED_BY,
    PEERS_PATH,
    TO,
    TOKEN,
    WAIT_SECONDS,
    is_peer,
    peer_token,
)
from popgate.wire.codec import CODEC, Codec
from popgate.wire.errors import NotUnderstood

__all__ = ["PEERS_PATH", "Forwarding", "PeerFace"]

_log = logging.getLogger(__name__)


class Forwarding(NamedTuple):
    """Describes how another proxy, ``by``, forwarded a client's request. This proxy answers the request, and does not
    forward it again.

    ``wait_seconds`` overrides the request's own value, unless it is None. ``client_id`` is the client of a pop, or
    None.
    """

    by: InstanceId
    wait_seconds: float | None
    client_id: ClientId | None = None


class PeerFace:
    """Answers requests that the peers of the proxy ``me`` send to it. All peers have the same ``secret``. ``codec``
    reads and writes the supported protocol versions."""

    def __init__(self, me: InstanceId, secret: bytes, answers: PeerAnswers, codec: Codec = CODEC) -> None:
        self._me = me
        self._token = peer_token(secret)
        self._answers = answers
        self._codec = codec

    def forwarding(self, headers: Mapping[bytes, bytes]) -> Forwarding | None:
        """Return how another proxy forwarded a request with these headers, or None for a client's request.

        A request without a peer's token is a client's request, even if it has the headers of a forwarded request.

        Raises: NotAPeer if the token is wrong (two proxies with different secrets would otherwise forward a request to
        each other endlessly); WrongInstance.
        """
        if PASSED_BY not in headers or TOKEN not in headers:
            return None
        self._let_in(headers)
        wait = headers.get(WAIT_SECONDS)
        client = headers.get(CLIENT_ID)
        return Forwarding(
            InstanceId(headers[PASSED_BY].decode("latin-1")),
            None if wait is None else _wait_seconds(wait),
            None if client is None else ClientId(client.decode("latin-1")),
        )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer a request for ``PEERS_PATH``, and return the status. Raises: ClientGone."""
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        headers: Sequence[tuple[bytes, bytes]]
        try:
            given = dict(scope["headers"])
            self._let_in(given)
            allow(scope["method"], "GET", "POST")
            if scope["method"] == "GET":
                await _hold(send, connection)
                return 200
            answer = await self._answer(await read_body(receive, given, REQUEST_BYTES_MAX))
            status, headers = 200, ((b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(answer)))
        except ClientGone:
            raise
        except PopgateError as error:
            status, headers, answer = problem_answer(error)
        except Exception as error:
            status, headers, answer = internal_problem(error, operation="peers")
        await send_answer(send, connection, status, headers, answer)
        return status

    def _let_in(self, headers: Mapping[bytes, bytes]) -> None:
        """Check the token of the headers, and that the request is addressed to this instance. Raises: NotAPeer,
        WrongInstance."""
        if not is_peer(headers, self._token):
            raise NotAPeer
        to = headers.get(TO, b"").decode("latin-1")
        if to != self._me:
            raise WrongInstance(to, self._me)

    async def _answer(self, body: bytes) -> bytes:
        """Return the encoded answer to a peer's message, or the encoded error. Raises: HttpError if the message can't
        be decoded."""
        try:
            version, sender, message = self._codec.decode_message(body)
        except NotUnderstood as error:
            raise HttpError(400, error.code, error.detail) from error
        try:
            return self._codec.encode_answer(version, message, await self._answers.answer(sender, message))
        except PopgateError as error:
            return self._codec.encode_error(version, error)
        except Exception as error:  # a bug of popgate: the peer receives no details
            _log.error("a peer's message failed", exc_info=error, extra={"message_type": type(message).__name__})
            failure = RetryLater(f"proxy {self._me} has failed; its log says more")
            return self._codec.encode_error(version, failure)


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
