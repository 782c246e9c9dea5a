"""The HTTP server of a proxy: its settings, its limits for clients, and the socket for other proxies."""

import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from popgate.api.app import ApiOptions
from popgate.api.connection_limiter import KEEP_ALIVE_SECONDS, ConnectionLimiter, HttpLimits
from popgate.api.server import server_config
from popgate.bootstrap.acceptor import Acceptor
from popgate.config import ServeOptions

GRACE_SECONDS = 1
"""Seconds that draining, and beside it the running requests, may take after a signal."""
PASSED_BYTES, PASSED_FIELDS = 4_096, 16
"""More bytes and header fields than a proxy adds to a request that it passes on."""


def api_options(options: ServeOptions) -> ApiOptions:
    """Return the API's options. The host in --peer-address counts as one of this proxy's names."""
    peer_hosts = () if options.peer_address is None else (options.peer_address.host.lower(),)
    return ApiOptions(allowed_hosts=options.allowed_hosts.union(peer_hosts))


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, because ours drains the engine first, and without its own accepting.

    While it serves, it accepts other proxies on ``peers``, at most ``peers_max``. ``limiter`` is for the clients'
    acceptor. ``count`` counts refused requests by status.
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
    """Return the limits for peers, which keep idle connections open and add fields to the requests that they pass
    on."""
    return replace(
        limits,
        connections_max=connections_max,
        connection_idle_seconds=KEEP_ALIVE_SECONDS,
        head_bytes_max=limits.head_bytes_max + PASSED_BYTES,
        head_fields_max=limits.head_fields_max + PASSED_FIELDS,
    )
