"""A worker's side of ``--workers``: what it got from its parent, and the messages between the two.

They share a pair of sockets. The worker reports that it serves, or why it can't; the parent then tells it to accept
clients. When the parent ends, for any reason, the pair closes and the worker ends, too.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import uvicorn

from popgate.api.connection_limiter import ConnectionLimiter
from popgate.bootstrap.acceptor import Acceptor, ClientCounts
from popgate.bootstrap.endings import end_in_time, handling
from popgate.bootstrap.front import Front

SERVES = b"+"
FAILED = b"-"
"""Prefix of the reason why a worker can't start."""
COME_IN = b"!"
"""Sent by the parent: accept clients."""
SAID_BYTES_MAX = 4_096


class WorkerFront:
    """The front of worker ``number``, which ``client_counts`` counts from 0; people see workers counted from 1."""

    def __init__(
        self, number: int, listener: socket.socket, client_counts: ClientCounts, parent: socket.socket
    ) -> None:
        self.worker: int | None = number + 1
        self._number = number
        self._listener = listener
        self._client_counts = client_counts
        self._parent = parent
        self._served: tuple[uvicorn.Server, ConnectionLimiter] | None = None
        self._acceptor: Acceptor | None = None
        self._stop: asyncio.Event | None = None
        self._ends = False

    @contextlib.contextmanager
    def opened(self, stop: asyncio.Event) -> Generator[None]:
        """Set ``stop`` at a SIGTERM, or when the parent has gone.

        Further signals change nothing: a service manager may send one to each process, and the parent sends one as
        well. The parent handles SIGINT.
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

    def serves(self, server: uvicorn.Server, limiter: ConnectionLimiter) -> None:
        self._served = server, limiter
        with contextlib.suppress(OSError):  # the parent has gone, which `_hear` notices as well
            self._parent.send(SERVES)

    def failed(self, why: str) -> None:
        """Report that the worker can't start."""
        self._parent.setblocking(True)
        with contextlib.suppress(OSError):
            self._parent.sendall(FAILED + why.encode()[: SAID_BYTES_MAX - 1])

    def close(self) -> None:
        """Stop accepting. The worker then ends in time even without a signal: its parent waits to start
        another one."""
        self._end()
        if self._acceptor is not None:
            self._acceptor.close()
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
        elif self._served is not None and self._acceptor is None and not self._ends:
            self._acceptor = Acceptor(self._listener, *self._served, self._client_counts, self._number)
            self._acceptor.open()

    def _end(self) -> None:
        if not self._ends and self._stop is not None:
            self._ends = True
            end_in_time(self._stop)


_conforms: type[Front] = WorkerFront
