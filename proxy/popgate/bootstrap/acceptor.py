"""Accepts clients while there is room.

Several workers accept from one socket. A worker with notably more clients than another one lets the other one accept
first.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from popgate.api.connection_limiter import ConnectionLimiter, LimitedConnection
from popgate.api.protocol import WatchedProtocol
from popgate.bootstrap.handshake import Handshake
from popgate.bootstrap.turns import YIELD_SECONDS, Turns
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_SECONDS = 1.0
"""Seconds to wait before the next attempt to accept, if the process has no free descriptor or memory."""
WARN_SECONDS = 60.0
"""Minimum number of seconds between two warnings."""
ACCEPTED_AT_ONCE_MAX = 16
"""Maximum number of connections that are accepted in a row before the event loop serves existing clients again."""


class Acceptor:
    """Accepts connections from ``listener`` between ``open`` and ``close``, and adds them to ``limiter``. ``close``
    closes the listener.

    Among several workers, ``turns`` determines whether this worker pauses before it accepts. ``config`` replaces the
    server's configuration, and is loaded. ``context`` returns the context for TLS of the next connection; without it,
    connections don't use TLS. ``untrusted`` is called with the reason and the address of each client whose handshake
    fails.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: uvicorn.Server,
        limiter: ConnectionLimiter,
        turns: Turns | None = None,
        *,
        config: uvicorn.Config | None = None,
        context: Callable[[], ssl.SSLContext] | None = None,
        untrusted: Callable[[ssl.SSLError, str], None] = lambda _error, _address: None,
    ) -> None:
        self._listener = listener
        self._turns = turns or Turns(1)
        self._server = server
        self._limiter = limiter
        self._config = server.config if config is None else config
        self._context = context
        self._untrusted = untrusted
        self._admitting = 0
        """Number of accepted connections that are not yet counted by the limiter."""
        self._warn_at = 0.0
        self._background = Background()
        self._loop = asyncio.get_running_loop()
        self._is_open = False
        self._is_full = False

    def open(self) -> None:
        self._is_open = True
        self._limiter.on_left = self._changed
        self._watch()

    def close(self) -> None:
        """Stop accepting connections, and close the listener. Accepted connections stay open. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._stop_watching()
        self._turns.leave()
        self._listener.close()

    def _watch(self) -> None:
        if self._is_open:
            self._is_full = False
            self._report()
            self._loop.add_reader(self._listener, self._readable)

    def _stop_watching(self) -> None:
        self._loop.remove_reader(self._listener)

    def _report(self) -> None:
        if self._is_open:
            self._turns.report(self._limiter.present + self._admitting)

    def _changed(self) -> None:
        """Report the new number of clients after a client was admitted or has left. Accept again if there was no
        room."""
        if not self._is_full:
            self._report()
        elif self._has_room:
            self._watch()

    @property
    def _has_room(self) -> bool:
        return self._admitting < self._limiter.room

    def _readable(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE_MAX):
            if not self._has_room:
                self._stop_watching()
                self._is_full = True
                self._turns.leave()  # the other workers don't wait for this one
                return
            if self._turns.should_yield():
                self._stop_watching()
                self._loop.call_later(YIELD_SECONDS, self._after_yielding)
                return
            if not self._accept():
                return

    def _after_yielding(self) -> None:
        """Accept a connection that the workers with fewer clients did not accept during the pause, because they hang or
        are busy."""
        if self._is_open:
            self._watch()
            self._accept()

    def _accept(self) -> bool:
        """Accept one connection. Return False if no connection was waiting, or if no connection can be accepted now."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # accepted by another worker, or closed
            return False
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if self._loop.time() >= self._warn_at:
                self._warn_at = self._loop.time() + WARN_SECONDS
                _log.warning("can't accept connections at the moment", extra={"why": error.strerror})
            self._stop_watching()
            self._loop.call_later(EXHAUSTED_SECONDS, self._watch)
            return False
        self._admitting += 1
        self._report()
        self._background.spawn(self._admit(connection), name="admit a client")
        return True

    async def _admit(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._first_protocol, connection)
        except OSError as error:
            connection.close()
            _log.debug("a client disconnected before it was admitted", extra={"why": str(error)})
        finally:
            self._admitting -= 1
            self._changed()

    def _first_protocol(self) -> asyncio.Protocol:
        if self._context is None:
            return self._protocol(None)
        return Handshake(self._context(), self._limiter, self._protocol, self._untrusted)

    def _protocol(self, after: LimitedConnection | None) -> WatchedProtocol:
        return WatchedProtocol(self._config, self._server.server_state, {}, limiter=self._limiter, after=after)
