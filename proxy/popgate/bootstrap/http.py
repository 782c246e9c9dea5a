"""The HTTP server of a proxy: its settings, who may come in, and the door for other proxies."""

import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from popgate.api.app import ApiOptions
from popgate.api.crowd import KEEP_ALIVE_SECONDS, Crowd, HttpLimits
from popgate.api.server import server_config
from popgate.bootstrap.door import Door
from popgate.config import ServeOptions

GRACE_SECONDS = 1
"""How long draining, and beside it the running requests, may take after a signal."""
PASSED_BYTES, PASSED_FIELDS = 4_096, 16
"""More than what a proxy adds to a head."""


def api_options(options: ServeOptions) -> ApiOptions:
    """The name under which other proxies address this one is one of its names."""
    peer_hosts = () if options.peer_address is None else (options.peer_address.host.lower(),)
    return ApiOptions(allowed_hosts=options.allowed_hosts.union(peer_hosts))


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, as ours drains the engine first, and without its own way to accept.

    ``peers`` is where other proxies come in, at most ``peers_max``, as long as it serves. ``crowd`` is for the front's
    door. ``count``: of refused requests, by status.
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
        self.crowd = Crowd(limits, count)
        self._peers = peers
        self._peers_door = None if peers is None else Door(peers, self, Crowd(_for_peers(limits, peers_max), count))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        if self._peers_door is not None:
            self._peers_door.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._peers_door is not None and self._peers is not None:
            self._peers_door.close()
            self._peers.close()
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
    """They keep connections for as long as they know, and add to the heads of requests that they pass on."""
    return replace(
        limits,
        connections_max=connections_max,
        connection_idle_seconds=KEEP_ALIVE_SECONDS,
        head_bytes_max=limits.head_bytes_max + PASSED_BYTES,
        head_fields_max=limits.head_fields_max + PASSED_FIELDS,
    )
