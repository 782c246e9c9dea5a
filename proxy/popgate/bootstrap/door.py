"""Several processes accept from one listening socket, and each gets its share of the clients.

Theory of operation. All workers wait for the same socket, so that a connection which waits for one that dies is
accepted by another; a socket for each (SO_REUSEPORT) would be closed with its worker, and reset what waits there. But
whoever wakes first would take all that came at once, and keep-alive connections stay where they are. So the workers
count theirs in memory that all of them see, and one that has more than others gives these the time to accept first:

    readable --nobody has much fewer--> accept one
        |--somebody has--> look away, a few times --taken meanwhile--> readable, again
                                     |--still there: they hang, or are busy--> accept, and don't wait for these
                                        before their count changes

A worker that does not accept (it starts, drains or has died) has no count, and nobody waits for it.
"""

import asyncio
import errno
import logging
import mmap
import select
import socket
from collections.abc import Callable, Mapping

import uvicorn

from popgate.api.connection import WatchedProtocol
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001
LOOKS_MAX = 20
"""After so many a connection that still waits is not left to those who have fewer."""
SPREAD_DIVISOR = 8
"""Having an eighth more than another, and one, is as good as having the same."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_SECONDS = 1.0

_ABSENT = 0xFFFF_FFFF


class Tally:
    """How many clients each worker has. Made before the workers are forked, who then share it: each writes its own
    count, and its parent takes away that of one that has died."""

    def __init__(self, size: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, size * 4)).cast("I")
        for worker in range(size):
            self.leave(worker)

    def __getitem__(self, worker: int) -> int:
        return self._counts[worker]

    def __setitem__(self, worker: int, count: int) -> None:
        self._counts[worker] = count

    def leave(self, worker: int) -> None:
        """It accepts nothing."""
        self._counts[worker] = _ABSENT

    def less_busy_than(self, worker: int) -> dict[int, int]:
        """The workers that have notably fewer clients, with their counts."""
        mine = self._counts[worker]
        limit = mine - mine // SPREAD_DIVISOR - 1
        return {other: count for other, count in enumerate(self._counts) if count < limit}


class Door:
    """Accepts from ``listener`` for ``worker``, where it is its turn, between ``open`` and ``close``."""

    def __init__(self, listener: socket.socket, tally: Tally, worker: int, server: uvicorn.Server) -> None:
        self._listener = listener
        self._tally = tally
        self._worker = worker
        self._server = server
        self._background = Background()
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._count = 0
        self._late: dict[int, int] = {}
        """Who let a connection wait, with the count that it had then."""
        self._later: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._tally[self._worker] = self._count
        self._watch()

    def close(self) -> None:
        """Idempotent. What was accepted stays."""
        if not self._is_open:
            return
        self._is_open = False
        self._tally.leave(self._worker)
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listener)

    # -- whose turn it is -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._readable)

    def _readable(self) -> None:
        ahead = self._ahead()
        if ahead:
            self._loop.remove_reader(self._listener)
            self._look_later(ahead, 1)
        else:
            self._accept()

    def _ahead(self) -> Mapping[int, int]:
        """To whom a connection should be left."""
        less_busy = self._tally.less_busy_than(self._worker)
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

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another worker took it, or it has gone
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            _log.warning("can't accept a connection", extra={"why": error.strerror})
            self._loop.remove_reader(self._listener)
            self._later = self._loop.call_later(EXHAUSTED_SECONDS, self._watch)
            return
        self._counted(1)
        self._background.spawn(self._admit(connection), name="admit a client")

    async def _admit(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            connection.close()
            self._counted(-1)
            _log.debug("a client has gone before it was admitted", extra={"why": str(error)})

    def _counted(self, more: int) -> None:
        self._count += more
        if self._is_open:
            self._tally[self._worker] = self._count

    def _protocol(self) -> asyncio.Protocol:
        return _CountedProtocol(self._server, lambda: self._counted(-1))


class _CountedProtocol(WatchedProtocol):
    """Tells when its connection has ended."""

    def __init__(self, server: uvicorn.Server, ended: Callable[[], None]) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)
