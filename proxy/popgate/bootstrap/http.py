"""Builds the HTTP server of a proxy: its settings, its limits for clients, and the socket for other proxies."""

import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from popgate.api.app import ApiOptions, build_app
from popgate.api.connection_limiter import KEEP_ALIVE_SECONDS, ConnectionLimiter, HttpLimits
from popgate.api.metrics import RequestCounts
from popgate.api.server import server_config
from popgate.bootstrap.acceptor import Acceptor
from popgate.config import ServeOptions
from popgate.replicas.view import CachedReplicaView
from popgate.runtime.clocks import SystemClock

if TYPE_CHECKING:
    from popgate.bootstrap import Proxy

GRACE_SECONDS = 1
"""Maximum seconds after a signal in which the engine drains and running requests end."""
PASSED_BYTES, PASSED_FIELDS = 4_096, 16
"""Additional bytes and header fields that a forwarded request may have. They exceed what a proxy adds when it forwards
a request."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers and without its listening socket. popgate handles signals itself, to drain
    the engine first.

    The server accepts at most ``peers_max`` connections of other proxies on the socket ``peers``. An ``Acceptor``
    accepts the clients, whose limits are in ``limiter``. ``count`` is called with the status of each refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        count: Callable[[int], None],
        peers: socket.socket | None,
        peers_max: int,
    ) -> None:
        super().__init__(server_config(app, host=options.host, port=options.port, shutdown_seconds=GRACE_SECONDS))
        limits = _limits(options)
        self.limiter = ConnectionLimiter(limits, count)
        self._peers_acceptor = (
            None if peers is None else Acceptor(peers, self, ConnectionLimiter(_for_peers(limits, peers_max), count))
        )

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


def http_server(proxy: "Proxy", options: ServeOptions, peers_max: int) -> Server:
    """Return the HTTP server of a started proxy. It accepts at most ``peers_max`` connections of other proxies."""
    place, requests = proxy.membership, RequestCounts()
    app = build_app(
        proxy.engine,
        proxy.locks,
        proxy.counters,
        _api_options(options),
        cluster=None if place is None else place.face,
        offered=options.features,
        requests=requests,
        journal=proxy.journal_figures,
        replicas=None if proxy.replicas is None else CachedReplicaView(proxy.replicas, SystemClock()),
    )
    peers = None if place is None else place.listener
    server = Server(app, options, partial(requests.count, "refused"), peers, peers_max)
    requests.connections = lambda: server.limiter.present
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
