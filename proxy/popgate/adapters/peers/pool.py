"""Manages the connections to one peer proxy. A connection stays open for some time after a request, for later requests.

Theory of operation. A request uses the idle connection that was used most recently, or opens a new connection. The peer
closes idle connections after 75 seconds, and this proxy closes them after 30 seconds. So the peer hardly ever closes a
connection just when a request is sent on it. If it does, the peer may already have carried out the request. The request
is sent again only under three conditions: a repetition does no harm (``repeatable``), the connection had been used
before, and no byte of an answer arrived. A request that failed on a new connection is not sent again.
"""

import asyncio
import re
import ssl

from popgate.adapters.peers.connection import PeerConnection, connect
from popgate.domain.errors import TooManyPops
from popgate.domain.names import InstanceId
from popgate.ports.peers import ForwardedAnswer

IDLE_SECONDS_MAX = 30.0
CONNECTIONS_MAX = 512
"""Maximum number of simultaneous requests to one peer that it answers at once. Further requests wait."""
WAITING_MAX = 512
"""Maximum number of simultaneous requests to one peer that may wait there, such as pulls. Further ones are refused."""
SHOWN_LENGTH_MAX = 100
"""Maximum characters of a wrong address that an error shows."""
HTTPS_PORT, PORT_MAX = 443, 65_535
_ADDRESS = re.compile(r"https://((?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?)/?")


def address_parts(address: str) -> tuple[str, int, bytes]:
    """Split the URL of a peer into its host, its port, and the value for the ``host`` header.

    Members publish their addresses in the store, into which another program may have written anything. Raises:
    ValueError if ``address`` is not a peer's URL.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None  # type: ignore[redundant-expr]
    port = HTTPS_PORT if match is None or match[4] is None else int(match[4])
    if match is None or not 0 < port <= PORT_MAX:
        raise ValueError(f"{str(address)[:SHOWN_LENGTH_MAX]!r} is not a peer's address, such as https://host:port")
    return match[2] or match[3], port, match[1].encode()


class PeerPool:
    """The connections to the proxy ``instance``. Use the pool within one event loop only.

    ``context`` authenticates the proxies to each other. Raises: ValueError if ``address`` is not an https URL.
    """

    def __init__(self, address: str, instance: InstanceId, context: ssl.SSLContext) -> None:
        self.address = address
        self._instance, self._context = instance, context
        self._host, self._port, self.authority = address_parts(address)
        self._idle: dict[PeerConnection, float] = {}
        """The idle connections, each with the loop time since which it has been idle, in the order of these times."""
        self._busy: set[PeerConnection] = set()
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._waiting_places = asyncio.Semaphore(WAITING_MAX)
        self._is_closed = False

    async def exchange(
        self, head: bytes, body: bytes, seconds: float, *, repeatable: bool, may_wait: bool
    ) -> ForwardedAnswer:
        """Send a request and return its answer, within ``seconds``.

        ``may_wait``: whether the peer may answer only after a wait. Such requests have places of their own, so they
        can't delay the others.

        If the answer does not arrive, or if the call is cancelled, the connection is reset. The reset tells the peer
        that its answer was not read.

        Raises: OSError, which includes TimeoutError and ConnectionError; TooManyPops.
        """
        if may_wait and self._waiting_places.locked():
            raise TooManyPops(
                f"the maximum number of requests wait on proxy {self._instance}; lower wait_seconds, or send them there"
            )
        async with asyncio.timeout(seconds), self._waiting_places if may_wait else self._places:
            connection = self._take()
            if connection is not None:
                try:
                    return await self._exchange(connection, head, body)
                except ConnectionError:
                    if connection.heard or not repeatable:
                        raise
            if self._is_closed:
                raise ConnectionAbortedError("its connections were closed")
            connection = await connect(self._host, self._port, self._context, self._instance, self._forget)
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
        """Remove and return the most recently used idle connection that is still usable. Return None if there is none.

        Close connections that have been idle for more than ``IDLE_SECONDS_MAX``.
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
