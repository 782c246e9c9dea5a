"""Distributes clients evenly among workers, all of which accept connections from one listening socket.

Theory of operation. With one shared socket, another worker can accept a connection that waits while one worker hangs or
dies. If each worker had its own socket (SO_REUSEPORT), the kernel would assign a share of the connections to a worker
that hangs, and would reset the connections that wait at a worker that dies. But with a shared socket, the worker that
wakes first would accept most connections, and these connections may stay open for a long time (keep-alive). So each
worker publishes its number of clients in shared memory. A worker that has notably more clients than another worker
pauses for ``YIELD_SECONDS`` before it accepts. A worker that does not accept (because it starts, drains, is full or has
died) publishes no number, and the other workers don't pause for it.
"""

import mmap

YIELD_SECONDS = 0.005
"""Seconds that a worker pauses before it accepts a waiting connection, so that a worker with fewer clients can accept
it first."""
SPREAD_DIVISOR = 8
"""Divisor of a worker's number of clients. The worker pauses if another worker has fewer clients, and the difference
exceeds this quotient plus one."""

_ABSENT = 0xFFFF_FFFF


class Turns:
    """The number of clients of each worker, in memory that all workers share. ``worker`` is the number of this process,
    and is set after the fork."""

    def __init__(self, size: int) -> None:
        self.worker = 0
        self._clients = memoryview(mmap.mmap(-1, size * 4)).cast("I")
        for worker in range(size):
            self.leave(worker)

    def report(self, clients: int) -> None:
        self._clients[self.worker] = clients

    def leave(self, worker: int | None = None) -> None:
        """Mark the worker with this number, or this process's worker if the number is None, as not accepting
        clients."""
        self._clients[self.worker if worker is None else worker] = _ABSENT

    def should_yield(self) -> bool:
        """Return whether another worker has notably fewer clients than this worker (see ``SPREAD_DIVISOR``)."""
        clients = self._clients[self.worker]
        return min(self._clients) < clients - clients // SPREAD_DIVISOR - 1
