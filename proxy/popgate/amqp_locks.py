"""Provides locks for programs that use AMQP. A program uses its own aio-pika connection, and needs no proxy.

    connection = await aio_pika.connect("amqp://...")
    locks = Locks(connection, holder="billing-7")
    async with locks.mutex("nightly").held(wait_seconds=10) as grant:
        await write_report(fencing_token=grant.fencing_token)

No lock is safe without fencing. If a holder is suspended or its network fails, it can't notice that the broker has
granted the lock to another client. So the protected resource must refuse each request whose fencing token is lower than
the highest token that the resource has seen. ``Fence`` and ``RedisFence`` do this.
"""

import contextlib
import os
import random
import socket
from collections.abc import AsyncGenerator

from aio_pika.abc import AbstractConnection

from popgate.adapters.rabbitmq.lock_driver import RabbitLockDriver
from popgate.adapters.redis.fence import RedisFence
from popgate.domain.errors import LockHeld, LockLost, LockNotFound, LockUnavailable
from popgate.domain.locks import LockKind
from popgate.locks.administration import LockAdministration, LockStatus, SlotStatus
from popgate.locks.fence import Fence
from popgate.locks.fenced import RENEW_SECONDS, FencedLock
from popgate.locks.grants import Grant
from popgate.locks.unfenced import UnfencedLock
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock

__all__ = [
    "Fence",
    "Grant",
    "Lock",
    "LockAdministration",
    "LockHeld",
    "LockKind",
    "LockLost",
    "LockNotFound",
    "LockStatus",
    "LockUnavailable",
    "Locks",
    "RedisFence",
    "SlotStatus",
]


class Lock:
    """A lock that is acquired over one connection. It may be acquired repeatedly, and by several tasks."""

    def __init__(self, lock: FencedLock | UnfencedLock) -> None:
        self._lock = lock

    async def acquire(self, wait_seconds: float = 0.0) -> Grant | None:
        """Acquire the lock. Return None if it does not become free within ``wait_seconds``.

        Raises: LockNotFound (if an administrator must first set the number of slots), LockUnavailable (if RabbitMQ does
        not answer).
        """
        return await self._lock.acquire(wait_seconds)

    @contextlib.asynccontextmanager
    async def held(self, wait_seconds: float = 0.0) -> AsyncGenerator[Grant]:
        """Acquire the lock for the ``async with`` block, and release it after the block.

        If the lock is lost inside the block, ``grant.lost`` is set.

        Raises: LockHeld if the lock does not become free within ``wait_seconds``. Also LockNotFound and
        LockUnavailable, as ``acquire`` does.
        """
        grant = await self.acquire(wait_seconds)
        if grant is None:
            raise LockHeld(f"lock {self._lock.lock} is held by others")
        try:
            yield grant
        finally:
            await grant.release()


class Locks:
    """Provides locks over one connection. ``holder`` is the name of this client that administrators see.

    A fenced and an unfenced lock (``fenced=False``) with the same name are separate locks. An unfenced lock has no
    fencing token, and its waiting clients are not served in order (``locks.unfenced``).
    """

    def __init__(
        self, connection: AbstractConnection, *, holder: str = "", renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._driver = RabbitLockDriver(connection)
        self._holder = holder or f"{socket.gethostname()}:{os.getpid()}"
        self._renew_seconds = renew_seconds
        self._clock = SystemClock()
        self._background = Background()
        self._chance = random.Random()
        self.administration = LockAdministration(self._driver, self._clock)

    def mutex(self, name: str, *, fenced: bool = True) -> Lock:
        """Return the mutex ``name``. It is created on the broker when it is first acquired. Raises: InvalidRequest."""
        return self._made(name, LockKind.MUTEX, fenced)

    def semaphore(self, name: str, *, fenced: bool = True) -> Lock:
        """Return the semaphore ``name``. An administrator sets how many clients may hold it. Raises: InvalidRequest."""
        return self._made(name, LockKind.SEMAPHORE, fenced)

    def persistent_mutex(self, name: str, *, fenced: bool = True) -> Lock:
        """Return the persistent mutex ``name``.

        An administrator enables it by setting one slot. Raises: InvalidRequest.
        """
        return self._made(name, LockKind.PERSISTENT_MUTEX, fenced)

    async def close(self) -> None:
        """Stop the background tasks, such as renewals. Does not release held locks.

        A held lock ends when it is released, or when the connection is closed.
        """
        await self._background.stop()

    def _made(self, name: str, kind: LockKind, fenced: bool) -> Lock:
        if not fenced:
            return Lock(
                UnfencedLock(
                    self._driver, name, kind, clock=self._clock, background=self._background, chance=self._chance
                )
            )
        return Lock(
            FencedLock(
                self._driver,
                name,
                kind,
                holder=self._holder,
                clock=self._clock,
                background=self._background,
                chance=self._chance,
                renew_seconds=self._renew_seconds,
            )
        )
