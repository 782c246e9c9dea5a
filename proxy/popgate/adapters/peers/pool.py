"""The connections to one peer: kept while they are used, and no longer than the peer keeps them.

Theory of operation. A request takes the connection that was used last, or makes one. The peer closes idle connections
after 75 seconds and this side after 30, so that a request hardly ever crosses with the peer's goodbye. If it does, the
request may have been done. It is sent again only if it does no harm twice (``repeatable``), and if a connection that
had been in use before brought no byte of an answer. A request that failed on a new connection is not sent again.
"""

import asyncio
from urllib.parse import urlsplit

from popgate.adapters.peers.connection import PeerConnection, connect
from popgate.ports.peers import ForwardedAnswer

IDLE_SECONDS_MAX = 30.0
CONNECTIONS_MAX = 512
"""Maximum number of requests to one peer at once; others wait."""
HTTP_PORT = 80


def address_parts(address: str) -> tuple[str, int, bytes]:
    """Return the host, the port, and both as in a ``host`` header. Raises: ValueError, if it is not a peer's URL."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{address} is not a peer's address, which looks like http://host:port")
    return parts.hostname, parts.port or HTTP_PORT, parts.netloc.rpartition("@")[2].encode()


class PeerPool:
    """Connections to one peer, used within one event loop. Raises: ValueError, if ``address`` is not an http URL."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port, self.authority = address_parts(address)
        self._idle: dict[PeerConnection, float] = {}
        """Since when each is idle; the one used last comes last."""
        self._busy: set[PeerConnection] = set()
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._is_closed = False

    async def exchange(self, head: bytes, body: bytes, seconds: float, *, repeatable: bool) -> ForwardedAnswer:
        """Return the answer to a request, within ``seconds``.

        If it does not arrive, or on cancellation, the connection is reset: the answer counts as unread. Raises:
        OSError, of which a TimeoutError and a ConnectionError are some.
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
        """Close all connections; requests that wait for an answer fail. Idempotent."""
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
        """Return the connection used last, if it is still fresh; close stale ones."""
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
