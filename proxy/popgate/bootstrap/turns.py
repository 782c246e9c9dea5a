"""Shares clients evenly among workers, which all accept from one listening socket.

Theory of operation. A connection that waits while a worker hangs or dies is accepted by another one. With a socket for
each worker (SO_REUSEPORT), the kernel would give a share of the connections to a worker that hangs, and reset those
that wait at a worker that dies. But the worker that wakes first would accept most connections, and keep-alive
connections stay where they are. So the workers keep their numbers of clients in shared memory, and a worker that has
notably more than another one pauses for a moment before it accepts. A worker that does not accept (it starts, drains,
is full or has died) has no number, and the others don't wait for it.
"""

import mmap

YIELD_SECONDS = 0.005
"""Seconds for which a worker leaves a waiting connection to workers with fewer clients."""
SPREAD_DIVISOR = 8
"""A worker yields only to workers that have fewer clients by more than one, plus one in this many of its own."""

_ABSENT = 0xFFFF_FFFF


class Turns:
    """The number of clients of each worker. ``worker`` is the number of this process, set after the fork."""

    def __init__(self, size: int) -> None:
        self.worker = 0
        self._clients = memoryview(mmap.mmap(-1, size * 4)).cast("I")
        for worker in range(size):
            self.leave(worker)

    def report(self, clients: int) -> None:
        self._clients[self.worker] = clients

    def leave(self, worker: int | None = None) -> None:
        """Mark this worker, or ``worker``, as not accepting."""
        self._clients[self.worker if worker is None else worker] = _ABSENT

    def should_yield(self) -> bool:
        """Return whether another worker has notably fewer clients than this one."""
        clients = self._clients[self.worker]
        return min(self._clients) < clients - clients // SPREAD_DIVISOR - 1
