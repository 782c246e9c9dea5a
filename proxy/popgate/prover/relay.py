"""Relays data between one client and the broker or a proxy. A relay counts round trips, and aborts connections on
demand.

This module runs a thread with its own event loop, so that it also works for a lock implementation that blocks its
thread. It reads the frames of AMQP 0-9-1, so that it can count round trips and new channels of any client library. For
HTTP, it treats each received piece of data as a whole request or answer. Only plain TCP is supported.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit, urlunsplit

from popgate.domain.errors import StartupError

PORTS = {"amqp": 5672, "http": 80}
CHUNK_BYTES = 65_536
START_SECONDS = 10.0
PROTOCOL_HEADER_BYTES = 8
FRAME_HEADER_BYTES = 7
FRAME_END_BYTES = 1
METHOD_FRAME, HEARTBEAT_FRAME = 1, 8
METHOD_BYTES = 4
CHANNEL_OPEN = b"\x00\x14\x00\x0a"
CONNECTION_CLOSE = (b"\x00\x0a\x00\x32", b"\x00\x0a\x00\x33")


@dataclass(slots=True)
class Traffic:
    """The number of round trips and of opened channels. A round trip is counted when the broker sends data for the
    first time after the client has sent data."""

    round_trips: int = 0
    channels: int = 0

    def since(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.round_trips - earlier.round_trips, self.channels - earlier.channels)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.round_trips + other.round_trips, self.channels + other.channels)


class Relay:
    """Relays every connection to ``broker_url``, which ``lead_to`` can change.

    If the broker ends an AMQP connection without a close method, ``on_lost`` is called in the relay's thread, with the
    monotonic time.
    """

    def __init__(self, broker_url: str, on_lost: Callable[[float], None]) -> None:
        self.traffic = Traffic()
        self._on_lost = on_lost
        self._port = 0
        self._links: set[_Link] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.lead_to(broker_url)
        threading.Thread(target=self._run, name="relay", daemon=True).start()
        if not self._ready.wait(START_SECONDS):
            raise StartupError("the relay to the broker did not start")

    def lead_to(self, broker_url: str) -> None:
        """Relay new connections to this URL. Existing connections do not change."""
        self._broker = urlsplit(broker_url)

    @property
    def url(self) -> str:
        """The URL that a client must use in place of the broker's URL, so that it connects to this relay."""
        credentials, at, _ = self._broker.netloc.rpartition("@")
        return urlunsplit(self._broker._replace(netloc=f"{credentials}{at}127.0.0.1:{self._port}"))

    def cut(self) -> None:
        """Abort all relayed connections. Return when they are aborted."""

        async def cut() -> None:
            for link in list(self._links):
                link.cut()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker = self._broker
        try:
            far_reader, far_writer = await asyncio.open_connection(broker.hostname, broker.port or PORTS[broker.scheme])
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self.traffic, writer, far_writer, has_frames=broker.scheme == "amqp")
        self._links.add(link)
        try:
            await link.carry(reader, far_reader)
        finally:
            self._links.discard(link)
            if link.lost_at is not None:
                self._on_lost(link.lost_at)


class _Link:
    """One relayed connection, in both directions."""

    def __init__(
        self, traffic: Traffic, client: asyncio.StreamWriter, broker: asyncio.StreamWriter, *, has_frames: bool
    ) -> None:
        self.lost_at: float | None = None
        self._traffic = traffic
        self._client = client
        self._broker = broker
        self._asked = False
        self._has_frames = has_frames
        self._ending = not has_frames
        """Whether the connection may end now without being reported as lost. An idle HTTP connection may always end."""

    async def carry(self, client: asyncio.StreamReader, broker: asyncio.StreamReader) -> None:
        """Relay data until either side ends the connection."""
        asked, answered = Pieces(self._from_client), Pieces(self._from_broker)
        if self._has_frames:
            asked, answered = Frames(self._from_client, after_header=True), Frames(self._from_broker)
        ways = [
            asyncio.ensure_future(self._carry(client, self._broker, asked)),
            asyncio.ensure_future(self._carry(broker, self._client, answered)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if ways[1].done() and not ways[0].done() and not self._ending:
            self.lost_at = monotonic()
        self.cut()
        await asyncio.wait(ways)

    def cut(self) -> None:
        self._ending = True
        self._client.transport.abort()
        self._broker.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, frames: "Pieces") -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                frames.feed(data)
                sink.write(data)
                await sink.drain()

    def _from_client(self, kind: int, method: bytes) -> None:
        if kind == HEARTBEAT_FRAME:
            return
        self._asked = True
        if kind == METHOD_FRAME and method == CHANNEL_OPEN:
            self._traffic.channels += 1
        self._see_end(kind, method)

    def _from_broker(self, kind: int, method: bytes) -> None:
        if kind == HEARTBEAT_FRAME:
            return
        if self._asked:
            self._asked = False
            self._traffic.round_trips += 1
        self._see_end(kind, method)

    def _see_end(self, kind: int, method: bytes) -> None:
        if kind == METHOD_FRAME and method in CONNECTION_CLOSE:
            self._ending = True


class Pieces:
    """Calls ``on_frame`` for each piece of received data, as if the piece were one frame."""

    def __init__(self, on_frame: Callable[[int, bytes], None]) -> None:
        self._on_frame = on_frame

    def feed(self, data: bytes) -> None:
        self._on_frame(0, b"")


class Frames(Pieces):
    """Splits a stream of bytes into AMQP frames.

    ``on_frame`` is called with each frame's type and the first bytes of its payload. In a method frame, these bytes are
    the ids of the class and the method. ``after_header``: the stream begins with the protocol header.
    """

    def __init__(self, on_frame: Callable[[int, bytes], None], *, after_header: bool = False) -> None:
        super().__init__(on_frame)
        self._buffer = bytearray()
        self._skipped = PROTOCOL_HEADER_BYTES if after_header else 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if self._skipped:
            if len(self._buffer) < self._skipped:
                return
            del self._buffer[: self._skipped]
            self._skipped = 0
        while len(self._buffer) >= FRAME_HEADER_BYTES:
            size = int.from_bytes(self._buffer[3:FRAME_HEADER_BYTES], "big")
            end = FRAME_HEADER_BYTES + size + FRAME_END_BYTES
            if len(self._buffer) < end:
                return
            self._on_frame(
                self._buffer[0], bytes(self._buffer[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + min(size, METHOD_BYTES)])
            )
            del self._buffer[:end]
