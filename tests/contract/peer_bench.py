"""A node that answers its peers: an embedded engine behind the real application and server, in this or a separate
process. It has one socket for clients, and one for its peers.

A table under the test's control determines the engine's answers to messages. `python -m contract.peer_bench PORT
INSTANCE FOLDER` runs one with its socket for peers on this port, until SIGTERM.
"""

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from popgate.adapters.peers import HttpPeers
from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.api.app import ClusterFace, build_app
from popgate.api.connection_limiter import ConnectionLimiter, HttpLimits
from popgate.api.peers import PeerApp, PeerFace
from popgate.api.protocol import WatchedProtocol
from popgate.api.server import server_config
from popgate.bootstrap.acceptor import Acceptor
from popgate.bootstrap.peer_tls import PeerTls, authority, tls_of
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineOptions, make_context
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.locks.embedded import EmbeddedArbiter
from popgate.locks.hosted import HostedLocks
from popgate.ports.peers import PeerMessage
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock
from popgate.runtime.data_folder import make_folder
from popgate.wire.codec import CODEC, Codec

SECRET = b"a secret of all these tests"
HOST = "127.0.0.1"
AUTHORITY = authority(SECRET)


def tls_for(instance: str, *, secret: bytes = SECRET) -> PeerTls:
    """Return the contexts of an instance of the cluster with this secret."""
    issuer = AUTHORITY if secret == SECRET else authority(secret)
    return tls_of(InstanceId(instance), issuer, [issuer])


def peers_of(
    instance: str,
    address_of: Callable[[InstanceId], str | None],
    *,
    secret: bytes = SECRET,
    version: Callable[[], int] = lambda: 1,
    codec: Codec = CODEC,
) -> HttpPeers:
    """Return what the instance sends to its peers with."""
    context = tls_for(instance, secret=secret).client
    return HttpPeers(InstanceId(instance), context, address_of=address_of, version=version, codec=codec)


class TableAnswers:
    """Answers a message with the entry of `says` for its type: a value, an error to raise, or a function of it."""

    def __init__(self) -> None:
        self.says: dict[type[PeerMessage[Any]], Any] = {}
        self.heard: list[tuple[InstanceId, PeerMessage[Any]]] = []

    async def answer(self, sender: InstanceId, message: PeerMessage[Any]) -> Any:
        self.heard.append((sender, message))
        said = self.says.get(type(message))
        if isinstance(said, Exception):
            raise said
        if not callable(said):
            return said
        return await cast("Callable[[PeerMessage[Any]], Awaitable[Any]]", said)(message)


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@dataclass(slots=True, kw_only=True)
class PeerNode:
    instance: InstanceId
    port: int
    peer_port: int
    engine: Engine
    answers: TableAnswers
    app: ASGIApp
    server: QuietServer | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://{HOST}:{self.port}"

    @property
    def peer_url(self) -> str:
        """Where its peers reach it."""
        return f"https://{HOST}:{self.peer_port}"

    @property
    def parked_pops(self) -> int:
        return sum(served.parked_pops for served in self.engine.topics.served.values())

    @property
    def peer_connections(self) -> list[WatchedProtocol]:
        assert self.server is not None
        connections = cast("set[WatchedProtocol]", self.server.server_state.connections)
        return [one for one in connections if one.transport.get_extra_info("sslcontext") is not None]

    @property
    def connections(self) -> int:
        """The number of its peers' connections."""
        return len(self.peer_connections)


@contextlib.asynccontextmanager
async def peer_node(
    folder: Path,
    instance: str,
    *,
    peer_port: int = 0,
    codec: Codec = CODEC,
    secret: bytes = SECRET,
    authenticates: bool = False,
    wrap: Callable[[PeerNode], ASGIApp] = lambda node: node.app,
) -> AsyncGenerator[PeerNode]:
    """Serve a node in this process. Its port for peers is a new one unless one is given."""
    clock, background, counters = SystemClock(), Background(), EventCounters()
    make_folder(folder)
    database = Database(folder / "popgate.db", clock)
    await database.open()
    broker = SqliteBroker(database)
    await broker.start()
    engine = Engine(
        make_context(
            EngineOptions(instance=instance, secrets=[SECRET], auto_create=True),
            broker=broker,
            dedup=SqliteDedupStore(database),
            leases=SqliteLeaseStore(database, records := LatestRecords()),
            lease_groups=SqliteLeaseGroups(database, records),
            assignments=SqliteAssignments(database),
            catalog=SqliteCatalog(database),
            journal=counters,
            clock=clock,
            background=background,
        )
    )
    await engine.start()
    store, answers, name = SqliteLockStore(database), TableAnswers(), InstanceId(instance)
    locks = HostedLocks(
        EmbeddedArbiter(store, clock, background), store, clock, background, instance=name, auto_create=True
    )
    face, tls = PeerFace(name, answers, codec), tls_for(instance, secret=secret)
    app = build_app(engine, locks, counters, cluster=ClusterFace(peers_of(instance, lambda _: None)))
    try:
        with listening() as listener, listening(peer_port) as for_peers:
            port, peer_port = listener.getsockname()[1], for_peers.getsockname()[1]
            node = PeerNode(instance=name, port=port, peer_port=peer_port, engine=engine, answers=answers, app=app)
            public = wrap(node)
            async with serving(public, listener) as node.server:
                peer_app = PeerApp(face, public, authenticates=authenticates)
                acceptor = acceptor_for(for_peers, node.server, peer_app, tls.server)
                acceptor.open()
                try:
                    yield node
                finally:
                    acceptor.close()
    finally:
        await engine.stop()
        await broker.stop()
        await database.close()


def acceptor_for(
    listener: socket.socket,
    server: uvicorn.Server,
    app: ASGIApp,
    context: ssl.SSLContext,
    limits: HttpLimits | None = None,
) -> Acceptor:
    """Return what accepts connections over TLS for the application."""
    config = server_config(app, host=HOST, port=0)
    config.load()
    limiter = ConnectionLimiter(limits or HttpLimits())
    return Acceptor(listener, server, limiter, config=config, context=lambda: context)


async def until(condition: Callable[[], bool], *, timeout_seconds: float = 5) -> None:
    """Return as soon as it holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def listening(port: int = 0) -> Generator[socket.socket]:
    # With the protocol named, asyncio turns off Nagle's algorithm for accepted connections, as in bootstrap.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        listener.setblocking(False)
        yield listener


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncGenerator[QuietServer]:
    server = QuietServer(server_config(app, host=HOST, port=0))
    running = asyncio.create_task(server.serve(sockets=[listener]), name="server of a test")
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await running


async def run(port: int, instance: str, folder: Path) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with peer_node(folder, instance, peer_port=port):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
