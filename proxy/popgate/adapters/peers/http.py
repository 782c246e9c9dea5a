"""Implements the peers port over HTTP: messages to ``/v1/peers``, and clients' requests in their original form.

Theory of operation. Every request names the receiving instance and carries the token. If another instance has the same
address, it refuses the request: a restarted process knows nothing of the requests to its predecessor. An instance with
another secret also refuses the request. Every failure raises PeerUnavailable. Unless no connection could be made, the
request may have been carried out nevertheless.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from popgate.adapters.peers.heads import client_headers, message_head, passing_head
from popgate.adapters.peers.pool import PeerPool
from popgate.adapters.peers.watching import Watch
from popgate.domain.errors import NoCommonVersion, PeerUnavailable
from popgate.domain.names import InstanceId
from popgate.domain.topics import WAIT_SECONDS_MAX
from popgate.ports.claims import Member
from popgate.ports.peers import (
    Available,
    CountMessages,
    Fetch,
    Follow,
    ForwardedAnswer,
    ForwardedRequest,
    Learned,
    PeerMessage,
    Peers,
    Wanted,
)
from popgate.wire.admission import ARRIVALS, REFUSALS, peer_token
from popgate.wire.codec import CODEC, Codec
from popgate.wire.errors import NotUnderstood

AnswerT = TypeVar("AnswerT")

ANSWER_SECONDS = 10.0
"""Maximum number of seconds for a peer's answer, in addition to the wait time of a forwarded request."""
QUOTED_LENGTH_MAX = 300
REPEATABLE: frozenset[type[PeerMessage[Any]]] = frozenset({Learned, Wanted, Available, Fetch, CountMessages, Follow})
"""Messages that may be sent twice: the second one does no harm and has the same answer. LeaseForGroup would lease
twice. The repeated answers of SettleAtOwner and PurgeAtOwner would describe only the repetition."""


class _Problem(msgspec.Struct):
    """The fields of a refusal that popgate reads."""

    code: str = ""
    detail: str = ""


_read_problem = msgspec.json.Decoder(_Problem).decode


class HttpPeers:
    """The peers of the proxy ``me``.

    ``address_of`` returns the URL of a member, or None for other instances. ``version`` returns the cluster's present
    protocol version, which is one of ``codec``'s versions. Connects on demand. Must be used within one event loop.
    """

    def __init__(
        self,
        me: InstanceId,
        secret: bytes,
        *,
        address_of: Callable[[InstanceId], str | None],
        version: Callable[[], int],
        codec: Codec = CODEC,
    ) -> None:
        self._me = me
        self._token = peer_token(secret)
        self._address_of = address_of
        self._version = version
        self._codec = codec
        self._pools: dict[InstanceId, PeerPool] = {}

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Send a message, as the port describes.

        After a cancellation the answer is lost, but the message may have been handled.
        """
        pool = self._pool(to)
        try:
            body = self._codec.encode_message(self._version(), self._me, message)
            head = message_head(pool.authority, to, self._token, len(body))
            answer = await self._exchange(pool, to, head, body, ANSWER_SECONDS, repeatable=type(message) in REPEATABLE)
            if answer.status != 200:
                raise PeerUnavailable(f"proxy {to} answered {answer.status}: {_problem(answer).detail}")
            return self._codec.decode_answer(message, answer.body)
        except (NotUnderstood, NoCommonVersion) as error:
            raise PeerUnavailable(f"proxy {to} and this one don't understand each other: {error.detail}") from error

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        """Forward a request, as the port describes. It is never sent twice, because a repeated pop would lease twice.

        A cancellation resets the connection, so that the peer releases the request's leases at once.
        """
        pool = self._pool(to)
        head = passing_head(pool.authority, to, self._token, request, self._me, wait_seconds)
        seconds = ANSWER_SECONDS + (WAIT_SECONDS_MAX if wait_seconds is None else wait_seconds)
        answer = await self._exchange(pool, to, head, request.body, seconds, repeatable=False)
        if answer.status in REFUSALS.values() and _problem(answer).code in REFUSALS:
            raise PeerUnavailable(f"proxy {to} refused: {_problem(answer).detail}")
        arrivals = next((int(value) for name, value in answer.headers if name == ARRIVALS), None)
        return ForwardedAnswer(answer.status, client_headers(answer.headers), answer.body, arrivals)

    async def died(self, member: Member) -> None:
        """Return once the member's process has certainly died.

        This is certain if its connection was closed without the end of an answer, and its port refuses connections or
        belongs to another instance. A SIGKILL is noticed at once. This never returns if the member left in order,
        hangs, or can't be reached. If the member could not be reached in the first place, its death is not noticed
        either.

        Raises: PeerUnavailable if the member's address is invalid.
        """
        try:
            watch = Watch(member, self._token)
        except ValueError as error:
            raise PeerUnavailable(f"proxy {member.instance} can't be watched: {error}") from error
        await watch.until_died()

    def close(self) -> None:
        """Close all connections. Requests that wait for an answer fail. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, to: InstanceId) -> PeerPool:
        address = self._address_of(to)
        pool = self._pools.get(to)
        if pool is not None and pool.address == address:
            return pool
        for other in [one for one in self._pools if one == to or self._address_of(one) is None]:
            self._pools.pop(other).close()
        if address is None:
            raise PeerUnavailable(f"proxy {to} is no longer a member of the cluster")
        try:
            pool = self._pools[to] = PeerPool(address)
        except ValueError as error:
            raise PeerUnavailable(f"proxy {to} can't be reached: {error}") from error
        return pool

    async def _exchange(
        self, pool: PeerPool, to: InstanceId, head: bytes, body: bytes, seconds: float, *, repeatable: bool
    ) -> ForwardedAnswer:
        try:
            return await pool.exchange(head, body, seconds, repeatable=repeatable)
        except TimeoutError as error:
            raise PeerUnavailable(f"proxy {to} at {pool.address} does not answer in time") from error
        except OSError as error:
            raise PeerUnavailable(f"proxy {to} at {pool.address} can't be reached: {_words(error)}") from error


_: type[Peers] = HttpPeers


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _problem(answer: ForwardedAnswer) -> _Problem:
    try:
        problem = _read_problem(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Problem(detail="no readable reason")
    return _Problem(problem.code, " ".join(problem.detail[:QUOTED_LENGTH_MAX].split()))
