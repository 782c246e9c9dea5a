"""Accepts clients, as long as there is room; where several processes accept from one listening socket, each gets its
share of them.

Theory of operation. All workers wait for the same socket, so that a connection which waits for one that dies is
accepted by another; a socket for each (SO_REUSEPORT) would be closed with its worker, and reset what waits there. But
whoever wakes first would take all that came at once, and keep-alive connections stay where they are. So the workers
count theirs in memory that all of them see, and one that has more than others gives these the time to accept first:

    readable --nobody has much fewer--> accept one
        |--somebody has--> look away, a few times --taken meanwhile--> readable, again
                                     |--still there: they hang, or are busy--> accept, and don't wait for these
                                        before their count changes

A worker that does not accept (it starts, drains, is full or has died) has no count, and the others don't wait for it.
A proxy that runs alone is the only worker of its tally.
"""

import asyncio
import errno
import logging
import mmap
import select
import socket
from collections.abc import Callable, Mapping

import uvicorn

from popgate.api.crowd import Crowd
from popgate.api.protocol import WatchedProtocol
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001
LOOKS_MAX = 20
"""After so many a connection that still waits is not left to those who have fewer."""
SPREAD_DIVISOR = 8
"""Having an eighth more than another, and one, is as good as having the same."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_SECONDS = 1.0
"""How long to wait for a descriptor, or for memory, that other parts of the process have taken."""
WARN_SECONDS = 60.0
"""At most one warning in that time."""
ACCEPTED_AT_ONCE_MAX = 16
"""By the only worker: between them, the clients that are there are served."""

_ABSENT = 0xFFFF_FFFF


class Tally:
    """How many clients each worker has. Made before the workers are forked, who then share it: each writes its own
    count, and its parent takes away that of one that has died."""

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
        """It accepts nothing."""
        self._counts[worker] = _ABSENT

    def less_busy_than(self, worker: int) -> dict[int, int]:
        """The workers that have notably fewer clients, with their counts."""
        mine = self._counts[worker]
        limit = mine - mine // SPREAD_DIVISOR - 1
        return {other: count for other, count in enumerate(self._counts) if count < limit}


class Door:
    """Accepts from ``listener`` into the ``crowd`` between ``open`` and ``close``, where it is the turn of ``worker``.

    Without a ``tally`` it always is.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: uvicorn.Server,
        crowd: Crowd,
        tally: Tally | None = None,
        worker: int = 0,
    ) -> None:
        self._listener = listener
        self._tally = tally or Tally(1)
        self._worker = worker
        self._server = server
        self._crowd = crowd
        self._at_once = ACCEPTED_AT_ONCE_MAX if len(self._tally) == 1 else 1
        self._admitting = 0
        """Those that the crowd does not know yet."""
        self._warn_at = 0.0
        self._background = Background()
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._count = 0
        self._late: dict[int, int] = {}
        """Who let a connection wait, with the count that it had then."""
        self._later: asyncio.TimerHandle | None = None
        self._is_open = False
        self._is_paused = False

    def open(self) -> None:
        self._is_open = True
        self._start()

    def close(self) -> None:
        """Idempotent. What was accepted stays."""
        if not self._is_open:
            return
        self._is_open = False
        self._tally.leave(self._worker)
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listener)

    def _start(self) -> None:
        if self._is_open:
            self._is_paused = False
            self._counted(0)
            self._watch()

    def _pause(self) -> None:
        """Until there is room again; the other workers don't wait for this one."""
        self._loop.remove_reader(self._listener)
        self._is_paused = True
        self._tally.leave(self._worker)
        self._crowd.await_room(self._start)

    # -- whose turn it is -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._readable)

    def _readable(self) -> None:
        ahead = self._ahead()
        if ahead:
            self._loop.remove_reader(self._listener)
            self._look_later(ahead, 1)
            return
        for _ in range(self._at_once):
            if self._admitting >= self._crowd.room:
                self._pause()
                return
            if not self._accept():
                return

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

    def _accept(self) -> bool:
        """Whether there was a connection."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another worker took it, or it has gone
            return False
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if self._loop.time() >= self._warn_at:
                self._warn_at = self._loop.time() + WARN_SECONDS
                _log.warning("can't accept connections for the moment", extra={"why": error.strerror})
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
            self._loop.call_soon(self._crowd.tell_room)
            _log.debug("a client has gone before it was admitted", extra={"why": str(error)})
        finally:
            self._admitting -= 1

    def _counted(self, more: int) -> None:
        self._count += more
        if self._is_open and not self._is_paused:
            self._tally[self._worker] = self._count

    def _protocol(self) -> asyncio.Protocol:
        return _CountedProtocol(self._server, self._crowd, lambda: self._counted(-1))


class _CountedProtocol(WatchedProtocol):
    """Tells when its connection has ended."""

    def __init__(self, server: uvicorn.Server, crowd: Crowd, ended: Callable[[], None]) -> None:
        super().__init__(server.config, server.server_state, {}, crowd=crowd)
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)
