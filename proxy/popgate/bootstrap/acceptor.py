"""Accepts clients while there is room, and shares them evenly among processes that accept from one listening socket.

Theory of operation. All workers wait on the same socket, so a connection that waits for a worker that dies is accepted
by another one. With a socket for each worker (SO_REUSEPORT), the kernel would reset the connections that wait at a
worker that dies. But the worker that wakes first would accept all connections that arrive together, and keep-alive
connections stay where they are. So the workers keep their connection counts in shared memory, and a worker with more
connections than others lets these accept first:

    readable --no worker has notably fewer--> accept one
       |--some have--> look again a few times --taken meanwhile--> readable, again
                            |--still there: they hang or are busy--> accept, and ignore these workers
                                                                     until their counts change

A worker that does not accept (it starts, drains, is full or has died) has no count, and the others don't wait for it. A
proxy that runs alone is the only worker in its counts.
"""

import asyncio
import errno
import logging
import mmap
import select
import socket
from collections.abc import Callable, Mapping

import uvicorn

from popgate.api.connection_limiter import ConnectionLimiter
from popgate.api.protocol import WatchedProtocol
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001
LOOKS_MAX = 20
"""Number of looks after which a worker no longer leaves a waiting connection to workers with fewer clients."""
SPREAD_DIVISOR = 8
"""A worker yields only to workers that have fewer clients by more than one, plus one in this many of its own."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_SECONDS = 1.0
"""Seconds to wait for a descriptor or memory when the process has run out of it."""
WARN_SECONDS = 60.0
"""Minimum number of seconds between two warnings."""
ACCEPTED_AT_ONCE_MAX = 16
"""Maximum number of connections that a sole worker accepts before it serves existing clients again."""

_ABSENT = 0xFFFF_FFFF


class ClientCounts:
    """Holds the number of clients of each worker, in memory that forked workers share.

    It is made before the workers are forked. Each worker writes its own count, and the parent clears the count of a
    worker that has died.
    """

    def __init__(self, size: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, size * 4)).cast("I")
        for worker in range(size):
            self.leave(worker)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, worker: int) -> int:
        return self._counts[worker]

    def __setitem__(self, worker: int, count: int) -> None:
        self._counts[worker] = count

    def leave(self, worker: int) -> None:
        """Mark a worker as not accepting."""
        self._counts[worker] = _ABSENT

    def less_busy_than(self, worker: int) -> dict[int, int]:
        """Return the workers that have notably fewer clients, with their counts."""
        mine = self._counts[worker]
        limit = mine - mine // SPREAD_DIVISOR - 1
        return {other: count for other, count in enumerate(self._counts) if count < limit}


class Acceptor:
    """Accepts connections from ``listener`` into ``limiter`` between ``open`` and ``close``, when it is the turn of
    ``worker``.

    Without ``client_counts`` it always is.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: uvicorn.Server,
        limiter: ConnectionLimiter,
        client_counts: ClientCounts | None = None,
        worker: int = 0,
    ) -> None:
        self._listener = listener
        self._client_counts = client_counts or ClientCounts(1)
        self._worker = worker
        self._server = server
        self._limiter = limiter
        self._at_once = ACCEPTED_AT_ONCE_MAX if len(self._client_counts) == 1 else 1
        self._admitting = 0
        """Number of accepted connections that the limiter does not know yet."""
        self._warn_at = 0.0
        self._background = Background()
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._count = 0
        self._late: dict[int, int] = {}
        """Workers that let a connection wait, with the counts that they had then."""
        self._later: asyncio.TimerHandle | None = None
        self._is_open = False
        self._is_paused = False

    def open(self) -> None:
        self._is_open = True
        self._start()

    def close(self) -> None:
        """Stop accepting; accepted connections stay. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._client_counts.leave(self._worker)
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listener)

    def _start(self) -> None:
        if self._is_open:
            self._is_paused = False
            self._counted(0)
            self._watch()

    def _pause(self) -> None:
        """Stop accepting until there is room again; the other workers don't wait for this one."""
        self._loop.remove_reader(self._listener)
        self._is_paused = True
        self._client_counts.leave(self._worker)
        self._limiter.await_room(self._start)

    # -- turns ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._readable)

    def _readable(self) -> None:
        ahead = self._ahead()
        if ahead:
            self._loop.remove_reader(self._listener)
            self._look_later(ahead, 1)
            return
        for _ in range(self._at_once):
            if self._admitting >= self._limiter.room:
                self._pause()
                return
            if not self._accept():
                return

    def _ahead(self) -> Mapping[int, int]:
        """Return the workers that should accept the next connection."""
        less_busy = self._client_counts.less_busy_than(self._worker)
        return {other: count for other, count in less_busy.items() if self._late.get(other) != count}

    def _look_later(self, ahead: Mapping[int, int], looks: int) -> None:
        self._later = self._loop.call_later(LOOK_SECONDS, self._look, ahead, looks)

    def _look(self, before: Mapping[int, int], looks: int) -> None:
        if self._poll.poll(0):
            ahead = self._ahead()
            if ahead and ahead != before:
                self._look_later(ahead, 1)
                return
            if ahead and looks < LOOKS_MAX:
                self._look_later(ahead, looks + 1)
                return
            self._late.update(ahead)
        self._watch()

    # -- accepting --------------------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Accept one connection; return False if none was waiting or none can be accepted now."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # taken by another worker, or gone
            return False
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if self._loop.time() >= self._warn_at:
                self._warn_at = self._loop.time() + WARN_SECONDS
                _log.warning("can't accept connections at the moment", extra={"why": error.strerror})
            self._loop.remove_reader(self._listener)
            self._later = self._loop.call_later(EXHAUSTED_SECONDS, self._watch)
            return False
        self._counted(1)
        self._admitting += 1
        self._background.spawn(self._admit(connection), name="admit a client")
        return True

    async def _admit(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            connection.close()
            self._counted(-1)
            self._loop.call_soon(self._limiter.tell_room)
            _log.debug("a client disconnected before it was admitted", extra={"why": str(error)})
        finally:
            self._admitting -= 1

    def _counted(self, more: int) -> None:
        self._count += more
        if self._is_open and not self._is_paused:
            self._client_counts[self._worker] = self._count

    def _protocol(self) -> asyncio.Protocol:
        return _CountedProtocol(self._server, self._limiter, lambda: self._counted(-1))


class _CountedProtocol(WatchedProtocol):
    """Calls ``ended`` when its connection has ended."""

    def __init__(self, server: uvicorn.Server, limiter: ConnectionLimiter, ended: Callable[[], None]) -> None:
        super().__init__(server.config, server.server_state, {}, limiter=limiter)
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)
