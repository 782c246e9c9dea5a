"""A worker's side of being one of several: what it got from its parent, and what the two tell each other.

They share a pair of sockets. The worker says that it serves, or why it can't; the parent then says that clients may
come in. The end of the parent is the end of that pair, however it has come about: the worker then ends, too.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import uvicorn

from popgate.api.crowd import Crowd
from popgate.bootstrap.door import Door, Tally
from popgate.bootstrap.endings import end_in_time, handling
from popgate.bootstrap.front import Front

SERVES = b"+"
FAILED = b"-"
"""What follows says why."""
COME_IN = b"!"
"""From the parent."""
SAID_BYTES_MAX = 4_096


class Seat:
    """The front of worker ``number``, counted from 0 in ``tally``; where people read, workers are counted from 1."""

    def __init__(self, number: int, listener: socket.socket, tally: Tally, parent: socket.socket) -> None:
        self.worker: int | None = number + 1
        self._number = number
        self._listener = listener
        self._tally = tally
        self._parent = parent
        self._served: tuple[uvicorn.Server, Crowd] | None = None
        self._door: Door | None = None
        self._stop: asyncio.Event | None = None
        self._ends = False

    @contextlib.contextmanager
    def opened(self, stop: asyncio.Event) -> Generator[None]:
        """``stop`` is set at a SIGTERM, and where the parent has gone. More of either change nothing: a service manager
        may send a signal to each process, and the parent sends one as well. SIGINT is the parent's business.
        """
        loop = asyncio.get_running_loop()
        self._stop = stop
        self._parent.setblocking(False)
        with handling([signal.SIGTERM], lambda _: self._end()):
            loop.add_reader(self._parent, self._hear)
            try:
                yield
            finally:
                loop.remove_reader(self._parent)

    def serves(self, server: uvicorn.Server, crowd: Crowd) -> None:
        self._served = server, crowd
        with contextlib.suppress(OSError):  # the parent has gone, which is heard as well
            self._parent.send(SERVES)

    def failed(self, why: str) -> None:
        """The worker can't start."""
        self._parent.setblocking(True)
        with contextlib.suppress(OSError):
            self._parent.sendall(FAILED + why.encode()[: SAID_BYTES_MAX - 1])

    def close(self) -> None:
        """It ends in time also where it ends by itself: its parent waits to start another one."""
        self._end()
        if self._door is not None:
            self._door.close()
        self._listener.close()

    def _hear(self) -> None:
        try:
            said = self._parent.recv(SAID_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(self._parent)
            self._end()
        elif self._served is not None and self._door is None and not self._ends:
            self._door = Door(self._listener, *self._served, self._tally, self._number)
            self._door.open()

    def _end(self) -> None:
        if not self._ends and self._stop is not None:
            self._ends = True
            end_in_time(self._stop)


_conforms: type[Front] = Seat
