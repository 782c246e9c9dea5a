"""Makes a proxy a member of a cluster: the proxy gets an address for its peers and a share of the queues."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from popgate.api.app import ClusterFace
from popgate.api.forwarded_locks import LockPeers
from popgate.api.peers import PeerFace
from popgate.bootstrap.listening import listening
from popgate.bootstrap.peer_tls import peer_tls
from popgate.bootstrap.state import State
from popgate.bootstrap.tracing import lease_traces, peers_type
from popgate.cluster.member_watch import MemberWatch
from popgate.cluster.ownership import Ownership
from popgate.cluster.protocols import common_version
from popgate.config import ServeOptions
from popgate.config.values import HostPort
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.domain.hosts import is_any_address
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.context.routing import Cluster
from popgate.engine.engine import Engine
from popgate.locks.hosted import HostedLocks
from popgate.ports.claims import Claims, Member
from popgate.ports.peers import Follow, PeerAnswers, PeerMessage
from popgate.runtime.background import Background
from popgate.wire import codec

AnswerT = TypeVar("AnswerT")
_log = logging.getLogger(__name__)

WARN_SECONDS = 60.0
"""Minimum seconds between two warnings about programs that were refused at the socket for peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This proxy's membership in a cluster: the socket on which peers reach it, the context for TLS on this socket, the
    ``face`` that answers the peers, the objects that reach them (``cluster``), and the proxy's ownership of queues."""

    listener: socket.socket
    context: ssl.SSLContext
    face: PeerFace
    cluster: ClusterFace
    ownership: Ownership

    async def join(self) -> None:
        """Make this proxy a member of the cluster, so that queues are assigned to it. Raises: StartupError."""
        try:
            await self.ownership.start()
        except StateUnavailable as error:
            raise StartupError(error.detail) from error


class _Known:
    """The other members of the cluster that this proxy knows. Until ``ownership`` is set, it knows none."""

    ownership: Ownership | None = None

    @property
    def members(self) -> Mapping[InstanceId, Member]:
        return {} if self.ownership is None else self.ownership.view.members

    def address_of(self, instance: InstanceId) -> str | None:
        member = self.members.get(instance)
        return None if member is None else member.address

    def version(self) -> int:
        """Return the protocol version that the cluster currently uses. Raises: NoCommonVersion."""
        return common_version(codec.CODEC.protocols, self.members.values())


class _Answers:
    """Answers peers through the engine. After a message that reports an administrator's change, it also updates the
    locks."""

    def __init__(self, engine: PeerAnswers, locks: HostedLocks) -> None:
        self._engine = engine
        self._locks = locks

    async def answer(self, sender: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Answer a peer's message. Raises: PopgateError."""
        try:
            return await self._engine.answer(sender, message)
        finally:
            if isinstance(message, Follow):
                await self._locks.follow()


async def membership(
    options: ServeOptions,
    state: State,
    claims: Claims,
    engine: Engine,
    context: EngineContext,
    locks: HostedLocks,
    stack: contextlib.AsyncExitStack,
    background: Background,
) -> Membership:
    """Prepare a proxy to become a member of the cluster. The other members see this proxy only after ``join``. Raises:
    StartupError."""
    me = InstanceId(context.instance)
    address = await _address(options, state)
    listener = stack.enter_context(listening(*address, partial(_why_not_listening, address)))
    url = _url(listener)
    tls = await asyncio.to_thread(peer_tls, me, context.options.secrets)
    known = _Known()
    made = peers_type(options)
    peers = made(me, tls.client, address_of=known.address_of, version=known.version, codec=codec.CODEC)
    stack.callback(peers.close)
    ownership = Ownership(
        Member(me, url, codec.CODEC.protocols, options.owns_queues),
        claims,
        engine.hosting,
        background,
        member_watch=MemberWatch(me, claims, background, peers.died),
    )
    known.ownership = ownership
    if state.on_data_loss is not None:
        state.on_data_loss(ownership.data_lost)
    context.router.join(
        Cluster(
            me=me,
            ownership=ownership,
            peers=peers,
            version=known.version,
            limits=state.limits,
        )
    )

    async def is_member(instance: InstanceId) -> bool:
        """Return whether ``instance`` is a member of the cluster. If it is not in the current view, ask the store,
        because it may have just joined."""
        return instance in ownership.view.members or instance in (await ownership.refreshed()).members

    lock_peers = LockPeers(me=me, peers=peers, is_member=is_member, sent=engine.count_forwarded)
    return Membership(
        listener=listener,
        context=tls.server,
        face=PeerFace(me, _Answers(engine.peering, locks), codec.CODEC, lease_traces(options, engine)),
        cluster=ClusterFace(peers, lock_peers, ownership.unready_reason),
        ownership=ownership,
    )


class UntrustedPeers:
    """Logs, at most once a minute, that a program without a certificate of the cluster used the socket for peers."""

    def __init__(self) -> None:
        self._warn_at = 0.0

    def __call__(self, error: ssl.SSLError, address: str) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            fields = {"address": address, "why": (error.reason or str(error)).lower().replace("_", " ")}
            _log.warning("refused a proxy with another secret, or another program, on the peers' socket", extra=fields)


async def _address(options: ServeOptions, state: State) -> HostPort:
    """Return the address at which other proxies reach this one. Raises: StartupError."""
    if options.peer_address is not None:
        return options.peer_address
    return HostPort(await state.local_address(), 0)


def _url(listener: socket.socket) -> str:
    """Return the URL at which other proxies reach the ``listener``. Raises: StartupError."""
    host, port = listener.getsockname()[:2]
    if is_any_address(host):  # the name in --peer-address has led to it
        raise StartupError("--peer-address must be an address at which other proxies reach this one, not any address")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _why_not_listening(address: HostPort, error: OSError) -> str:
    where = f"{address.host}:{address.port}"
    return f"can't listen on {where} for the other proxies: {error.strerror or error}; check --peer-address"
