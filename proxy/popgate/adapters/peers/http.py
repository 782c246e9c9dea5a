"""Implements the peers port over HTTP: sends messages to ``/v1/peers``, and forwards clients' requests unchanged.

Theory of operation. All connections use TLS with certificates on both sides, whose authorities are derived from the
cluster's secret. A certificate names an instance (one run of a proxy). If the certificate at a member's address names
another instance, for example after a restart, or does not belong to the cluster, no request is sent there. Every
failure raises PeerUnavailable. After a failure, the peer may still have carried out the request, unless no connection
could be made.
"""

import logging
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from popgate.adapters.peers.heads import client_headers, message_head, passing_head
from popgate.adapters.peers.identity import ForeignPeer
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
from popgate.runtime.current_request import current_request_id
from popgate.wire.admission import ARRIVALS, REFUSALS, WAITED_SECONDS
from popgate.wire.codec import CODEC, Codec
from popgate.wire.errors import NotUnderstood

AnswerT = TypeVar("AnswerT")
_log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Maximum number of seconds for a peer's answer, in addition to the wait time of a forwarded request."""
QUOTED_LENGTH_MAX = 300
REPEATABLE: frozenset[type[PeerMessage[Any]]] = frozenset({Learned, Wanted, Available, Fetch, CountMessages, Follow})
"""Types of messages that may be sent twice, because the second message does no harm and gets the same answer. A second
LeaseForGroup would lease more messages. A second SettleAtOwner or PurgeAtOwner would get an answer that does not report
what the first one did."""


class _Problem(msgspec.Struct):
    """The fields of a peer's error answer that this module reads."""

    code: str = ""
    detail: str = ""


_read_problem = msgspec.json.Decoder(_Problem).decode


class HttpPeers:
    """Sends requests from the proxy ``me`` to its peers, the other proxies of the cluster.

    ``context`` contains the certificate of this proxy, and the authorities of the cluster.
    ``address_of`` returns the URL of an instance that is a member of the cluster, or None for any other instance.
    ``version`` returns the protocol version that the cluster uses at present; ``codec`` supports this version.
    Connections are opened on demand. Use the object within one event loop only.
    """

    def __init__(
        self,
        me: InstanceId,
        context: ssl.SSLContext,
        *,
        address_of: Callable[[InstanceId], str | None],
        version: Callable[[], int],
        codec: Codec = CODEC,
    ) -> None:
        self._me = me
        self._context = context
        self._address_of = address_of
        self._version = version
        self._codec = codec
        self._pools: dict[InstanceId, PeerPool] = {}
        self._foreign: set[InstanceId] = set()
        """Members whose foreign certificate was logged."""

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Send a message to the proxy ``to`` and return the answer, as the port describes.

        If the call is cancelled, the peer may still handle the message.
        """
        pool = self._pool(to)
        try:
            body = self._codec.encode_message(self._version(), self._me, message)
            head = message_head(pool.authority, to, len(body), current_request_id())
            repeatable = type(message) in REPEATABLE
            answer = await self._exchange(pool, to, head, body, ANSWER_SECONDS, repeatable=repeatable, may_wait=False)
            if answer.status != 200:
                raise PeerUnavailable(f"proxy {to} answered {answer.status}: {_problem(answer).detail}")
            return self._codec.decode_answer(message, answer.body)
        except (NotUnderstood, NoCommonVersion) as error:
            raise PeerUnavailable(f"proxy {to} and this one don't understand each other: {error.detail}") from error

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        """Forward a client's request to the proxy ``to`` and return the answer, as the port describes.

        The request is never sent twice, because a repeated pop would lease more messages. If the call is cancelled, it
        resets the connection, so that the peer immediately releases the leases of this request.
        """
        pool = self._pool(to)
        try:
            head = passing_head(pool.authority, to, request, self._me, wait_seconds)
        except NotUnderstood as error:
            raise PeerUnavailable(error.detail) from error
        seconds = ANSWER_SECONDS + (WAIT_SECONDS_MAX if wait_seconds is None else wait_seconds)
        answer = await self._exchange(
            pool, to, head, request.body, seconds, repeatable=False, may_wait=wait_seconds != 0.0
        )
        if answer.status in REFUSALS.values() and _problem(answer).code in REFUSALS:
            raise PeerUnavailable(f"proxy {to} refused: {_problem(answer).detail}")
        arrivals = next((int(value) for name, value in answer.headers if name == ARRIVALS), None)
        waited = next((float(value) for name, value in answer.headers if name == WAITED_SECONDS), None)
        return ForwardedAnswer(answer.status, client_headers(answer.headers), answer.body, arrivals, waited)

    async def died(self, member: Member) -> None:
        """Wait until it is certain that the member's process has died.

        It is certain if a connection to the process was closed before the end of an answer, and if the process's port
        then refuses connections or is used by another instance. After a SIGKILL, this method returns at once. It never
        returns if the member leaves the cluster in order, hangs, or can't be reached. It does not detect the death of a
        member that it could not reach before.

        Raises: PeerUnavailable if the member's address is invalid.
        """
        try:
            watch = Watch(member, self._context, lambda error: self._is_foreign(member.instance, member.address, error))
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
            pool = self._pools[to] = PeerPool(address, to, self._context)
        except ValueError as error:
            raise PeerUnavailable(f"proxy {to} can't be reached: {error}") from error
        return pool

    async def _exchange(
        self,
        pool: PeerPool,
        to: InstanceId,
        head: bytes,
        body: bytes,
        seconds: float,
        *,
        repeatable: bool,
        may_wait: bool,
    ) -> ForwardedAnswer:
        try:
            return await pool.exchange(head, body, seconds, repeatable=repeatable, may_wait=may_wait)
        except TimeoutError as error:
            raise PeerUnavailable(f"proxy {to} at {pool.address} does not answer in time") from error
        except OSError as error:
            if isinstance(error, ForeignPeer):
                self._is_foreign(to, pool.address, error)
            raise PeerUnavailable(f"proxy {to} at {pool.address} can't be reached: {_words(error)}") from error

    def _is_foreign(self, instance: InstanceId, address: str, error: ForeignPeer) -> None:
        """Log once for each member that another program is at its address, or that it has another secret."""
        if instance not in self._foreign:
            self._foreign = {one for one in self._foreign if self._address_of(one) is not None} | {instance}
            fields = {"proxy": instance, "address": address, "why": str(error)}
            _log.warning("a proxy has another secret, or another program is at its address", extra=fields)


_: type[Peers] = HttpPeers


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _problem(answer: ForwardedAnswer) -> _Problem:
    try:
        problem = _read_problem(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Problem(detail="no readable reason")
    return _Problem(problem.code, " ".join(problem.detail[:QUOTED_LENGTH_MAX].split()))
