"""Builds the HTTP server of a proxy: its settings, its limits for clients, and the socket for other proxies."""

import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from popgate.api.app import ApiOptions, build_app
from popgate.api.connection_limiter import KEEP_ALIVE_SECONDS, ConnectionLimiter, HttpLimits
from popgate.api.gate import Gate
from popgate.api.known_heads import HttpConfig
from popgate.api.peers import PeerApp
from popgate.api.request_counts import RequestCounts
from popgate.api.request_log import is_logged
from popgate.api.server import server_config
from popgate.api.slow_requests import SlowRequests
from popgate.bootstrap.acceptor import Acceptor
from popgate.bootstrap.cluster import UntrustedPeers
from popgate.bootstrap.hosted_doctor import hosted_doctor
from popgate.bootstrap.journal import journal_stories
from popgate.bootstrap.tls import server_tls
from popgate.bootstrap.tracing import within_trace
from popgate.bootstrap.turns import Turns
from popgate.config import ServeOptions
from popgate.journal.reports import ReportFolder
from popgate.replicas.view import CachedReplicaView
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock
from popgate.runtime.log_levels import LogLevels

if TYPE_CHECKING:
    from popgate.bootstrap import Proxy

GRACE_SECONDS = 1
"""Maximum seconds after a signal in which the engine drains and running requests end."""
PASSED_BYTES, PASSED_FIELDS = 20 << 10, 16
"""Additional bytes and header fields that a forwarded request may have. They exceed what a proxy adds when it forwards
a request."""


class PeersSocket(NamedTuple):
    """The socket on which at most ``connections_max`` connections of other proxies are served by ``app`` only."""

    listener: socket.socket
    context: ssl.SSLContext
    app: ASGIApp
    connections_max: int


class Server(uvicorn.Server):
    """uvicorn without its signal handlers and without its listening socket. popgate handles signals itself, to drain
    the engine first.

    The server accepts connections of other proxies on the socket ``peers``. An ``Acceptor`` accepts the clients, whose
    limits are in ``limiter``. ``context`` returns the context for TLS of the next client, or is None without TLS.
    ``untrusted`` is called with the reason and the address of each client whose handshake fails. ``count`` is called
    with the status of each refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        count: Callable[[int], None],
        peers: PeersSocket | None,
        context: Callable[[], ssl.SSLContext] | None,
        untrusted: Callable[[ssl.SSLError, str], None],
    ) -> None:
        self._within_trace = within_trace(options)
        super().__init__(
            server_config(
                app,
                host=options.host,
                port=options.port,
                shutdown_seconds=GRACE_SECONDS,
                within_trace=self._within_trace,
            )
        )
        limits = _limits(options)
        self._configs = [self.config]
        self.limiter = ConnectionLimiter(limits, count)
        self._context, self._untrusted = context, untrusted
        self._peers_acceptor = None if peers is None else self._acceptor_of(peers, limits, count)

    def acceptor(self, listener: socket.socket, turns: Turns | None) -> Acceptor:
        """Return what accepts the clients of a listening socket."""
        context, untrusted = self._context, self._untrusted
        return Acceptor(listener, self, self.limiter, turns, context=context, untrusted=untrusted)

    def _acceptor_of(self, peers: PeersSocket, limits: HttpLimits, count: Callable[[int], None]) -> Acceptor:
        config = server_config(peers.app, host="", port=0, within_trace=self._within_trace)
        config.load()
        self._configs.append(config)
        limiter = ConnectionLimiter(_for_peers(limits, peers.connections_max), count)
        context = peers.context
        return Acceptor(
            peers.listener, self, limiter, config=config, context=lambda: context, untrusted=UntrustedPeers()
        )

    def observe_requests(self, *, everything: bool) -> None:
        """From now on, log all requests, or none."""
        for config in self._configs:
            if isinstance(config, HttpConfig):
                config.observe(everything=everything)
        for connection in self.server_state.connections:
            connection.app = connection.config.loaded_app  # type: ignore[union-attr]  # of its kinds, we have one

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        if self._peers_acceptor is not None:
            self._peers_acceptor.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._peers_acceptor is not None:
            self._peers_acceptor.close()
        await super().shutdown(sockets=[])


def http_server(
    proxy: "Proxy", options: ServeOptions, peers_max: int, background: Background, *, is_insecure: bool
) -> Server:
    """Return the HTTP server of a started proxy. It accepts at most ``peers_max`` connections of other proxies.

    ``is_insecure``: other machines can reach the server without authentication or without TLS. Raises: StartupError.
    """
    tls = server_tls(options)
    if tls is not None:
        background.keep(tls.run, name="watch the TLS files")
    place, requests, levels = proxy.membership, RequestCounts(), LogLevels(options.log_level)
    access = proxy.access
    proxy.engine.inspector.stories = journal_stories(options)
    app = build_app(
        proxy.engine,
        proxy.locks,
        proxy.counters,
        _api_options(options),
        cluster=None if place is None else place.cluster,
        offered=options.features,
        requests=requests,
        journal=proxy.journal_figures,
        replicas=None if proxy.replicas is None else CachedReplicaView(proxy.replicas, SystemClock()),
        access=access.figures(tls, is_insecure=is_insecure),
        process=proxy.process,
        levels=levels,
        backup=proxy.backup,
        doctor=hosted_doctor(options, proxy.engine),
        reports=None if options.report_folder is None else ReportFolder(options.report_folder),
    )
    if access.credentials is not None:
        topics = proxy.engine.topics
        app = Gate(app, access.credentials, topics=lambda: topics.specs, count=requests.count, audit=access.denials)
        background.keep(app.run, name="end requests of revoked callers")
    peers: PeersSocket | None = None
    if place is not None:
        authenticates = proxy.access.credentials is not None
        peer_app = PeerApp(place.face, app, authenticates=authenticates, count=requests.count)
        peers = PeersSocket(place.listener, place.context, peer_app, peers_max)
    context = None if tls is None else tls.context
    server = Server(app, options, partial(requests.count, "refused"), peers, context, access.untrusted)
    requests.connections = lambda: server.limiter.present
    levels.watch(lambda: server.observe_requests(everything=is_logged()))
    if options.slow_request_seconds:
        slow = SlowRequests(lambda: server.server_state.connections, options.slow_request_seconds)
        background.keep(slow.run, name="look for slow requests")
    return server


def _api_options(options: ServeOptions) -> ApiOptions:
    """Return the options of the HTTP interface. The host in --peer-address is one of the allowed host names."""
    peer_hosts = () if options.peer_address is None else (options.peer_address.host.lower(),)
    return ApiOptions(allowed_hosts=options.allowed_hosts.union(peer_hosts))


def _limits(options: ServeOptions) -> HttpLimits:
    return HttpLimits(
        connections_max=options.connections_max,
        connection_idle_seconds=options.connection_idle_seconds,
        head_bytes_max=options.head_bytes_max,
        head_fields_max=options.head_fields_max,
        path_bytes_max=options.path_bytes_max,
        head_seconds=options.head_seconds,
        body_bytes_per_second_min=options.body_bytes_per_second_min,
        bodies_bytes_max=options.bodies_bytes_max,
    )


def _for_peers(limits: HttpLimits, connections_max: int) -> HttpLimits:
    """Return the limits for the connections of peers. Peers leave idle connections open, and add header fields to the
    requests that they forward."""
    return replace(
        limits,
        connections_max=connections_max,
        connection_idle_seconds=KEEP_ALIVE_SECONDS,
        head_bytes_max=limits.head_bytes_max + PASSED_BYTES,
        head_fields_max=limits.head_fields_max + PASSED_FIELDS,
    )
