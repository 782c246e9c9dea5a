"""Distributes clients evenly among workers, all of which accept connections from one listening socket.

Theory of operation. With one shared socket, a connection that waits while a worker hangs or dies is accepted by another
worker. If each worker had its own socket (SO_REUSEPORT), the kernel would assign a share of the connections to a worker
that hangs, and would reset the connections that wait at a worker that dies. But with a shared socket, the worker that
wakes first would accept most connections, and keep-alive connections stay at their worker. So the workers publish their
numbers of clients in shared memory. A worker that has notably more clients than another one pauses for a moment before
it accepts. A worker that does not accept (it starts, drains, is full or has died) has no number, and the other workers
don't wait for it.
"""

import mmap

YIELD_SECONDS = 0.005
"""Seconds for which a worker leaves a waiting connection to workers that have fewer clients."""
SPREAD_DIVISOR = 8
"""A worker yields if another one has fewer clients. The difference must exceed one, plus its own number of clients
divided by this."""

_ABSENT = 0xFFFF_FFFF


class Turns:
    """The number of clients of each worker. ``worker`` is the number of this process, which is set after the fork."""

    def __init__(self, size: int) -> None:
        self.worker = 0
        self._clients = memoryview(mmap.mmap(-1, size * 4)).cast("I")
        for worker in range(size):
            self.leave(worker)

    def report(self, clients: int) -> None:
        self._clients[self.worker] = clients

    def leave(self, worker: int | None = None) -> None:
        """Mark ``worker``, or this worker if it is None, as not accepting."""
        self._clients[self.worker if worker is None else worker] = _ABSENT

    def should_yield(self) -> bool:
        """Return whether another worker has notably fewer clients than this one."""
        clients = self._clients[self.worker]
        return min(self._clients) < clients - clients // SPREAD_DIVISOR - 1
