"""Manages the connections to one peer, which are kept for some time after a request.

Theory of operation. A request uses the connection that was used last, or opens a new one. The peer closes idle
connections after 75 seconds, and this side closes them after 30. So the peer hardly ever closes a connection just when
a request is sent. If it does, the request may have been carried out. The request is sent again only if a repetition
does no harm (``repeatable``), and only if no byte of an answer arrived on a connection that had been used before. A
request that failed on a new connection is not sent again.
"""

import asyncio
from urllib.parse import urlsplit

from popgate.adapters.peers.connection import PeerConnection, connect
from popgate.ports.peers import ForwardedAnswer

IDLE_SECONDS_MAX = 30.0
CONNECTIONS_MAX = 512
"""Maximum number of simultaneous requests to one peer. Further requests wait."""
HTTP_PORT = 80


def address_parts(address: str) -> tuple[str, int, bytes]:
    """Return the host, the port, and the value for a ``host`` header.

    Raises: ValueError if ``address`` is not a peer's URL.
    """
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{address} is not a peer's address, which looks like http://host:port")
    return parts.hostname, parts.port or HTTP_PORT, parts.netloc.rpartition("@")[2].encode()


class PeerPool:
    """Connections to one peer, used within one event loop. Raises: ValueError if ``address`` is not an http URL."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port, self.authority = address_parts(address)
        self._idle: dict[PeerConnection, float] = {}
        """Idle connections, with the time since which each has been idle. The one that was used last is last."""
        self._busy: set[PeerConnection] = set()
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._is_closed = False

    async def exchange(self, head: bytes, body: bytes, seconds: float, *, repeatable: bool) -> ForwardedAnswer:
        """Return the answer to a request, within ``seconds``.

        If the answer does not arrive, or the call is cancelled, the connection is reset, so that the peer treats the
        answer as unread.

        Raises: OSError, which includes TimeoutError and ConnectionError.
        """
        async with asyncio.timeout(seconds), self._places:
            connection = self._take()
            if connection is not None:
                try:
                    return await self._exchange(connection, head, body)
                except ConnectionError:
                    if connection.heard or not repeatable:
                        raise
            if self._is_closed:
                raise ConnectionAbortedError("its connections were closed")
            connection = await connect(self._host, self._port, self._forget)
            return await self._exchange(connection, head, body)

    def close(self) -> None:
        """Close all connections. Requests that wait for an answer fail. Idempotent."""
        self._is_closed = True
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: PeerConnection, head: bytes, body: bytes) -> ForwardedAnswer:
        self._busy.add(connection)
        try:
            answer = await connection.exchange(head, body)
        except BaseException:
            connection.reset()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_usable and not self._is_closed:
            self._idle[connection] = asyncio.get_running_loop().time()
        else:
            connection.close()
        return answer

    def _take(self) -> PeerConnection | None:
        """Return the connection that was used last, if it is still usable, or None.

        Close connections that were idle too long.
        """
        if not self._idle:
            return None
        oldest_allowed = asyncio.get_running_loop().time() - IDLE_SECONDS_MAX
        while self._idle and self._idle[first := next(iter(self._idle))] < oldest_allowed:
            del self._idle[first]
            first.close()
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
        return None

    def _forget(self, connection: PeerConnection) -> None:
        self._idle.pop(connection, None)
