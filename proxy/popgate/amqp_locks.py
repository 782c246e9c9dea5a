"""Locks for AMQP programs, over their own aio-pika connection and without a proxy.

    connection = await aio_pika.connect("amqp://...")
    locks = Locks(connection, holder="billing-7")
    async with locks.mutex("nightly").held(wait_seconds=10) as grant:
        await write_report(fencing_token=grant.fencing_token)

No lock is safe without fencing: a holder that is suspended (by a long pause or a cut network) can't know that the
broker has given the lock to another client. So let the protected resource refuse every request whose token is lower
than one that the resource has seen. ``Fence`` and ``RedisFence`` do this.
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
    """A lock of one connection. It may be acquired repeatedly, and by several tasks."""

    def __init__(self, lock: FencedLock | UnfencedLock) -> None:
        self._lock = lock

    async def acquire(self, wait_seconds: float = 0.0) -> Grant | None:
        """Acquire the lock. Return None if other clients hold it for all of ``wait_seconds``.

        Raises: LockNotFound (an administrator has to set its slots), LockUnavailable (RabbitMQ does not answer).
        """
        return await self._lock.acquire(wait_seconds)

    @contextlib.asynccontextmanager
    async def held(self, wait_seconds: float = 0.0) -> AsyncGenerator[Grant]:
        """Hold the lock inside the block. If the lock is lost there, ``grant.lost`` is set.

        Raises: LockHeld if other clients hold it for all of ``wait_seconds``; LockNotFound, LockUnavailable.
        """
        grant = await self.acquire(wait_seconds)
        if grant is None:
            raise LockHeld(f"lock {self._lock.lock} is held by others")
        try:
            yield grant
        finally:
            await grant.release()


class Locks:
    """Provides locks over one connection. ``holder`` is the client's name for administrators.

    A lock with ``fenced=False`` is not the same lock as the fenced one of that name. It has neither a fencing token nor
    a line of waiting clients (``locks.unfenced``).
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
        """Return a mutex, which is created when it is first used. Raises: InvalidRequest."""
        return self._made(name, LockKind.MUTEX, fenced)

    def semaphore(self, name: str, *, fenced: bool = True) -> Lock:
        """Return a semaphore, which can have as many holders as an administrator allows. Raises: InvalidRequest."""
        return self._made(name, LockKind.SEMAPHORE, fenced)

    def persistent_mutex(self, name: str, *, fenced: bool = True) -> Lock:
        """Return a mutex that an administrator enables by setting one slot. Raises: InvalidRequest."""
        return self._made(name, LockKind.PERSISTENT_MUTEX, fenced)

    async def close(self) -> None:
        """End the background tasks. Held locks end when they are released, or with the connection."""
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
